"""Tokens, bytes, hours and memory from configuration alone: no weights, no data, no more than the target's config.

Letters: D hidden size, M taps, V vocabulary. Hours assume that a GPU reaches a share of its peak in what dominates: the
target answering, the target over the data once, and the drafter over it ``epochs`` times, forward and backward.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from omegaconf import OmegaConf

from deepspec.data.cache import MANIFEST, CacheConfig, DiskSpaceError
from deepspec.data.codecs import CODECS, Codec
from deepspec.models import families
from deepspec.recipes import recipes_dir

if TYPE_CHECKING:
    from deepspec.data.config import DataPipelineConfig

# Dense bfloat16 peak, TFLOP/s, as the vendor states it.
GPUS: Final = {"B200": 2250, "H200": 989, "H100": 989, "A100": 312, "L40S": 362, "RTX 4090": 165}
RECIPE: Final = "dspark"  # whose drafter and epochs are counted
CAPTURE_SHARE: Final = 0.4  # of the peak, in a forward without a cache
GENERATE_TOKENS: Final = 0.02  # of the peak: decoding in large batches is bound by memory
TRAIN_SHARE: Final = 0.35  # of the peak, in a training step, as deepspec/train/plan.py assumes
MEAN_TOKENS: Final = 950  # tokens of a chat sample where nothing is known (Open-PerfectBlend at ≤ 4096)
MEAN_SUPERVISED: Final = 0.7
ROW_BYTES: Final = 5  # per token, for ids, spans and file structure
SPARE: Final = 1.05  # free space asked for, relative to the estimate


@dataclass
class EstimateConfig:
    """The cards whose hours are stated: ``gpus`` of kind ``gpu``, or of every kind known (null)."""

    gpu: str | None = None
    gpus: int = 1

    def __post_init__(self) -> None:
        """Raise ValueError for values that cannot work."""
        if self.gpu is not None and self.gpu not in GPUS:
            raise ValueError(f"estimate.gpu is {self.gpu}: give one of {', '.join(GPUS)}, or null for all of them")
        if self.gpus < 1:
            raise ValueError(f"estimate.gpus is {self.gpus}: give at least 1")


def state_bytes(codec: Codec, hidden: int, taps: int, tokens: int, states: int) -> int:
    """Expected bytes of a cache: taps of ``tokens`` tokens, ``states`` last states, ROW_BYTES per token."""
    return int(codec.bytes_per_value * hidden * (taps * tokens + states)) + ROW_BYTES * tokens


def require_space(folder: Path, needed: int, tokens: int, config: CacheConfig) -> int:
    """Free bytes where the cache ``folder`` lies or will lie; raises DiskSpaceError if ``needed`` are too many."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if needed * SPARE > free and not config.ignore_disk_space:
        raise DiskSpaceError(
            f"{folder} needs about {human_bytes(needed)} for {tokens} tokens with "
            f"cache={config.codec} and {existing} has {human_bytes(free)} free: choose cache=int8 or cache=int4, lower "
            "cache.limit, free some space, or set cache.ignore_disk_space=true"
        )
    return free


def human_bytes(count: float) -> str:
    """12345678 → '12.3 MB'."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} PB"


@dataclass(frozen=True)
class Sizes:
    """Parameter counts of a target by its config: all, those one token passes (MoE), embedding or head.

    ``layer`` is a draft layer, ``context`` its keys and values, which see every token of the context.
    """

    total: int
    active: int
    layer: int
    embedding: int
    context: int


def sizes_of(config: Any) -> Sizes:
    """Parameters of a Hugging Face text config, norms left out."""
    hidden, vocab = config.hidden_size, config.vocab_size
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    keys = (getattr(config, "num_key_value_heads", None) or config.num_attention_heads) * head_dim
    attention = 2 * hidden * (config.num_attention_heads * head_dim) + 2 * hidden * keys
    dense = 3 * hidden * config.intermediate_size
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if experts:
        expert = 3 * hidden * config.moe_intermediate_size
        mlp, used = experts * expert, config.num_experts_per_tok * expert
    else:
        mlp, used = dense, dense
    embedding = vocab * hidden
    ends = embedding if getattr(config, "tie_word_embeddings", False) else 2 * embedding
    layers = config.num_hidden_layers
    return Sizes(
        total=layers * (attention + mlp) + ends,
        active=layers * (attention + used),
        layer=attention + dense,
        embedding=embedding,
        context=2 * hidden * keys,
    )


@dataclass(frozen=True)
class Estimate:
    """What a pipeline will need. Hours are of one GPU, by its kind."""

    samples: int
    tokens: int
    states: int
    raw_bytes: int
    bytes: dict[str, int]
    capture_hours: dict[str, float]
    generate_hours: dict[str, float]
    drafter_parameters: int
    drafter_bytes: dict[str, int]
    layers: int
    train_hours: dict[str, float]


def estimate_from(
    config: Any,
    *,
    taps: int,
    samples: int,
    mean_tokens: float,
    layers: int = 5,
    markov_rank: int = 0,
    block_size: int = 7,
    anchors: int = 512,
    epochs: int = 1,
) -> Estimate:
    """Estimate for ``samples`` conversations of ``mean_tokens`` and a block drafter.

    Drafter memory counts weights, gradients, AdamW moments and fp32 masters (16 bytes per parameter in bf16 training),
    and the target's frozen embedding and head in bfloat16. Training work is deepspec/train/plan.py's.
    """
    sizes, hidden = sizes_of(config), config.hidden_size
    tokens = int(samples * mean_tokens)
    states = int(tokens * MEAN_SUPERVISED)
    projection = taps * hidden * hidden
    drafter = layers * sizes.layer + projection + 2 * markov_rank * config.vocab_size
    context = layers * sizes.context + projection
    drafted = int(samples * min(anchors, mean_tokens * MEAN_SUPERVISED)) * block_size
    work = drafted * (6 * (drafter - context) + 4 * sizes.embedding) + 2 * sizes.embedding * states
    work += 6 * context * tokens
    frozen = 2 * (sizes.embedding if getattr(config, "tie_word_embeddings", False) else 2 * sizes.embedding)
    return Estimate(
        samples=samples,
        tokens=tokens,
        states=states,
        raw_bytes=2 * hidden * (taps + 1) * tokens,
        bytes={name: state_bytes(codec, hidden, taps, tokens, states) for name, codec in CODECS.items()},
        capture_hours=_hours(2 * sizes.active * tokens, CAPTURE_SHARE),
        generate_hours=_hours(2 * (sizes.active + sizes.embedding) * states, GENERATE_TOKENS),
        drafter_parameters=drafter,
        drafter_bytes={"weights and AdamW": 16 * drafter, "frozen embedding and head": frozen},
        layers=layers,
        train_hours=_hours(epochs * work, TRAIN_SHARE),
    )


def _hours(flops: float, share: float) -> dict[str, float]:
    return {name: flops / (peak * 1e12 * share) / 3600 for name, peak in GPUS.items()}


def describe(estimate: Estimate, name: str, assumed: str, cards: EstimateConfig | None = None) -> list[str]:
    """Lines for people; hours of ``cards``, or of one GPU of every kind."""
    cards = cards or EstimateConfig()
    per_token = {codec: size / max(estimate.tokens, 1) for codec, size in estimate.bytes.items()}
    lines = [
        f"{name}: {estimate.samples} samples, about {_count(estimate.tokens)} tokens ({assumed})",
        f"  raw bfloat16   {human_bytes(estimate.raw_bytes)}, {estimate.raw_bytes / max(estimate.tokens, 1):.0f} bytes "
        "per token",
    ]
    for codec, size in estimate.bytes.items():
        lines.append(f"  cache={codec:<8} {human_bytes(size)}, {per_token[codec]:.0f} bytes per token")
    for gpu in [cards.gpu] if cards.gpu else GPUS:
        generate, capture, train = (
            _time(hours[gpu] / cards.gpus)
            for hours in (estimate.generate_hours, estimate.capture_hours, estimate.train_hours)
        )
        lines.append(f"  {cards.gpus} × {gpu:<10} responses {generate}, cache {capture}, training {train}")
    parts = ", ".join(f"{what} {human_bytes(size)}" for what, size in estimate.drafter_bytes.items())
    lines.append(
        f"  drafter        {estimate.drafter_parameters / 1e6:.0f} M parameters in {estimate.layers} layers: {parts}"
    )
    return lines


def _time(hours: float) -> str:
    return f"{hours:.1f} h" if hours >= 1 else f"{60 * hours:.1f} min"


def _count(number: int) -> str:
    return (
        f"{number / 1e9:.2f} G"
        if number >= 1e9
        else f"{number / 1e6:.1f} M"
        if number >= 1e6
        else f"{number / 1e3:.0f} k"
    )


def estimate(cfg: "DataPipelineConfig") -> Estimate:
    """Print and return the estimate for a pipeline; downloads nothing but the target's config.

    The number of samples is known when prompts or responses exist, else it is the recipe's limit; lengths are assumed.
    Raises DiskSpaceError for a cache of a known number of samples that would not fit.
    """
    from transformers import AutoConfig

    from deepspec.models.target import resolve

    config = families.text_config(AutoConfig.from_pretrained(resolve(cfg.target), revision=cfg.target.revision))
    taps = len(cfg.target.taps) if cfg.target.taps else len(families.default_taps(config.num_hidden_layers))
    samples, how, counted = _samples(cfg)
    mean = min(MEAN_TOKENS, cfg.cache.max_length, cfg.regenerate.max_new_tokens / MEAN_SUPERVISED)
    result = estimate_from(config, taps=taps, samples=samples, mean_tokens=mean, **_recipe())
    assumed = f"{how}; {mean:.0f} tokens each, {MEAN_SUPERVISED:.0%} supervised assumed"
    print("\n".join(describe(result, cfg.target.name, assumed, cfg.estimate)))
    _check_space(cfg, result, counted)
    return result


def _recipe() -> dict[str, int]:
    """What RECIPE says of the drafter and its training."""
    plain = OmegaConf.load(recipes_dir() / "recipe" / f"{RECIPE}.yaml")
    drafter = {name: plain.drafter[name] for name in ("layers", "markov_rank", "block_size")}
    return {**drafter, "anchors": plain.data.anchors, "epochs": plain.train.epochs}


def _check_space(cfg: "DataPipelineConfig", result: Estimate, counted: bool) -> None:
    """Raise DiskSpaceError, or say so where the number of samples is a guess, if the cache would not fit."""
    folder = Path(cfg.cache_path)
    if "://" in cfg.cache_path or (folder / MANIFEST).is_file():
        return  # of a finished cache the build asks room for what is missing only
    there = sum(shard.stat().st_size for shard in folder.glob("shard-*.parquet"))
    try:
        require_space(folder, max(0, result.bytes[cfg.cache.codec] - there), result.tokens, cfg.cache)
    except DiskSpaceError as error:
        if counted:
            raise
        print(f"  would not fit: {error}")


def _samples(cfg: "DataPipelineConfig") -> tuple[int, str, bool]:
    """Number of conversations, how it is known, and whether it was counted."""
    from deepspec.data.responses import answered_ids

    limits = [limit for limit in (cfg.prompts.limit, cfg.regenerate.limit, cfg.cache.limit) if limit is not None]
    prompts = cfg.prompts_dir / "train.jsonl"
    answered, asked = len(answered_ids(cfg.responses_dir)), 0
    if prompts.is_file():
        with prompts.open("rb") as lines:
            asked = sum(1 for _ in lines)
    if asked > answered:  # answers may be on their way
        count, known = asked, "prompts counted"
    elif answered:
        count, known = answered, "responses counted"
    elif limits:
        count, known = min(limits), "the recipe's limit"
    else:
        count, known = 100_000, "per 100 000 samples: run the prompts step for the real number"
    return min([count, *limits]), known, known.endswith("counted")
