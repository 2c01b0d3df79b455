"""The frozen target: load, forward to taps and post-norm last states, logits, and the proof that these are the
model's own. Also its embedding and head alone. Knows no drafters and no data.

Letters: B rows, T tokens of a call, D hidden size, M taps, F = M·D, V vocabulary.
"""

import hashlib
import inspect
import json
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepspec.distributed import default_device, native_dtype
from deepspec.models import families
from deepspec.models.frozen_head import FrozenHead as FrozenHead
from deepspec.models.frozen_head import cap_logits, matmul_fp32
from deepspec.models.kv_cache import KVCache
from deepspec.models.ragged import ATTENTION, RaggedCache, RaggedPlan
from deepspec.models.sampling import CardSampling

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
# transformers makes an empty tokenizer up where a folder has none of these.
_TOKENIZER_FILES = ("tokenizer*", "*.model", "vocab.*", "tekken.json")
_VOLATILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "use_cache")


class TargetError(ValueError):
    """A target that cannot be used as asked."""


class NormStageError(TargetError):
    """Hidden states that the head does not turn into the model's own logits, as a wrong norm gives them."""


@dataclass
class TargetConfig:
    """Which target. ``path`` is a hub id or a folder; ``taps`` None derives them; dtype auto is float32 on the CPU and
    bfloat16 on accelerators; native is bfloat16 also on CPUs that multiply it.

    ``sampling`` is what the model's card says to sample with, by mode. It is for models whose generation_config speaks
    for one of their two modes only; answering prompts reads it.
    """

    name: str
    path: str
    revision: str | None = None
    taps: list[int] | None = None
    dtype: str = "auto"
    thinking: bool = False
    sampling: CardSampling = field(default_factory=CardSampling)

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "native", *_DTYPES):
            raise TargetError(f"target.dtype {self.dtype!r} is not one of auto, native, {', '.join(_DTYPES)}")

    @property
    def mode(self) -> str:
        """The mode that prompts are rendered in: thinking or direct."""
        return "thinking" if self.thinking else "direct"


def resolve(cfg: TargetConfig) -> str:
    """Where the weights are: ``cfg.path`` if it is a folder, else the folder ``$DEEPSPEC_TARGETS/<name>`` (default
    ``targets/<name>``) if there is one, else ``cfg.path`` as a hub id."""
    if cfg.path and Path(cfg.path).is_dir():
        return cfg.path
    local = Path(os.environ.get("DEEPSPEC_TARGETS", "targets")) / cfg.name
    return str(local) if local.is_dir() else cfg.path


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Torch dtype of a TargetConfig.dtype on a device."""
    if dtype == "native":
        return native_dtype(device)
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return _DTYPES[dtype]


def gguf_file(folder: str) -> str | None:
    """Name of the GGUF file of a folder that has no safetensors, else None."""
    path = Path(folder)
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return None
    return min((file.name for file in path.glob("*.gguf")), default=None)


def load_tokenizer(path: str, revision: str | None = None) -> Any:
    """The tokenizer of a hub id or folder (of a GGUF file too). Raises TargetError where there is none."""
    from transformers import AutoTokenizer

    folder, gguf = Path(path), gguf_file(path)
    if folder.is_dir() and gguf is None and not any(any(folder.glob(name)) for name in _TOKENIZER_FILES):
        raise TargetError(f"{path} holds no tokenizer (tokenizer.json): copy it from where the weights came from")
    try:
        return AutoTokenizer.from_pretrained(path, revision=revision, **({"gguf_file": gguf} if gguf else {}))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise TargetError(f"the tokenizer of {path} cannot be read: {reason}") from error


@dataclass
class TargetStates:
    """One forward: concatenated taps (None if not asked for) and last states after the final norm. Padding is zero."""

    taps_BTF: Tensor | None
    last_BTD: Tensor


class Target:
    """A causal LM, frozen, reduced to what speculative decoding needs. Its outputs carry no gradient, but are ordinary
    tensors (not inference tensors), so that a drafter can be trained on them."""

    def __init__(
        self,
        model: nn.Module,
        *,
        name: str,
        path: str | None = None,
        revision: str | None = None,
        tokenizer: Any = None,
        taps: Sequence[int] | None = None,
    ) -> None:
        full_config: Any = model.config
        self.model: Any = model.eval().requires_grad_(False)
        self.name, self.path, self._revision = name, path, revision
        self.family = families.family_of(full_config)
        families.require_fixed_rope(full_config)
        self.config: Any = families.text_config(full_config)
        self.num_layers, self.hidden_size = self.config.num_hidden_layers, self.config.hidden_size
        self.taps = families.validate_taps(
            families.default_taps(self.num_layers) if taps is None else taps, self.num_layers
        )
        self._tokenizer = tokenizer
        self._fingerprint: str | None = None
        self.decoder = self._find_decoder()
        self.layers = list(getattr(self.decoder, self.family.layers))
        self.embedding: nn.Module = getattr(self.decoder, self.family.embed)
        self.head_VD: Tensor = self.model.get_output_embeddings().weight
        self.vocab_size = self.head_VD.shape[0]
        self.softcap = families.softcap(self.config)
        self.windows = families.layer_windows(self.config)
        parameters = inspect.signature(type(self.decoder).forward).parameters
        self._cache_keyword = "cache" if "cache" in parameters else "past_key_values"
        self._lock = threading.Lock()  # of the taps being collected: a reading thread and an evaluation share a target
        self._collected: dict[int, Tensor] = {}
        self._wanted: frozenset[int] = frozenset()
        self._hook_layers()
        self.model.set_attn_implementation(ATTENTION)

    @classmethod
    def load(cls, cfg: TargetConfig, device: torch.device | str | None = None) -> "Target":
        """Load onto ``device`` (default: the accelerator, else the CPU) and run the norm-stage proof.

        Raises UnknownFamilyError and RopeError before the weights are read, NormStageError after.
        """
        from transformers import AutoConfig, AutoModelForCausalLM

        place = default_device() if device is None else torch.device(device)
        path = resolve(cfg)
        source: dict[str, Any] = {"revision": cfg.revision}
        if (gguf := gguf_file(path)) is not None:
            source["gguf_file"] = gguf
        stored = AutoConfig.from_pretrained(path, **source)
        families.family_of(stored)  # refuse before the weights are read
        families.require_fixed_rope(stored)
        if place.type != "cpu":
            torch.accelerator.set_device_index(place.index or 0)  # what synchronises or allocates by default means it
            if gguf is None:
                source["device_map"] = {"": place}  # straight there: not every rank's copy through the host's memory
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=pick_dtype(cfg.dtype, place), **source)
            model = model.to(place)
        except torch.OutOfMemoryError as error:
            raise TargetError(
                f"target {cfg.name} does not fit into the memory of {place}, and a target over several devices is not "
                "supported: answer prompts with a server (regenerate.engine=openai), or take a larger device"
            ) from error
        target = cls(model, name=cfg.name, path=path, revision=cfg.revision, taps=cfg.taps)
        target.prove_norm_stage()
        return target

    @classmethod
    def from_model(
        cls, model: nn.Module, tokenizer: Any = None, taps: Sequence[int] | None = None, name: str = "tiny"
    ) -> "Target":
        """Wrap a model already in memory; it is frozen, and its attention implementation becomes the ragged one (equal
        to sdpa in the model's own forward). Runs the norm-stage proof."""
        target = cls(model, name=name, tokenizer=tokenizer, taps=taps)
        target.prove_norm_stage()
        return target

    def _find_decoder(self) -> nn.Module:
        for path in self.family.decoder_paths:
            module = self.model
            for part in path.split("."):
                module = getattr(module, part, None)
            if module is not None and hasattr(module, self.family.layers) and hasattr(module, self.family.final_norm):
                return module
        raise TargetError(f"{self.name}: no text decoder at any of {', '.join(self.family.decoder_paths)}")

    def _hook_layers(self) -> None:
        def keep(tap: int):
            def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
                if tap in self._wanted:
                    self._collected[tap] = output[0] if isinstance(output, tuple) else output

            return hook

        self.embedding.register_forward_hook(keep(-1))
        for tap, layer in enumerate(self.layers):
            layer.register_forward_hook(keep(tap))

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.head_VD.device

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype."""
        return self.head_VD.dtype

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer, loaded on first use."""
        if self._tokenizer is None:
            if self.path is None:
                raise TargetError(f"target {self.name} was made from a model in memory: pass tokenizer= to from_model")
            self._tokenizer = load_tokenizer(self.path, self._revision)
        return self._tokenizer

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer: the generation config's and the tokenizer's eos, and the family's end of turn."""
        ids: set[int] = set()
        generation = getattr(self.model, "generation_config", None)
        for eos in (getattr(generation, "eos_token_id", None), self.config.eos_token_id):
            ids.update(eos if isinstance(eos, list | tuple) else [] if eos is None else [eos])
        if self._tokenizer is not None or self.path is not None:
            if self.tokenizer.eos_token_id is not None:
                ids.add(self.tokenizer.eos_token_id)
            added = self.tokenizer.get_added_vocab()
            ids.update(added[text] for text in self.family.end_of_turn if text in added)
        return tuple(sorted(ids))

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the text config and a fixed sample of every weight in bfloat16: equal for the same checkpoint in
        any dtype and place, different for another fine-tune of the same shape."""
        if self._fingerprint is None:
            config = {key: value for key, value in self.config.to_dict().items() if key not in _VOLATILE}
            digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
            for name, parameter in self.decoder.named_parameters():
                flat = parameter.detach().flatten()
                sample = flat[:: max(1, flat.numel() // 64)].to("cpu", torch.bfloat16)
                digest.update(name.encode() + sample.view(torch.int16).numpy().tobytes())
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def new_cache(self, rows: int, max_length: int) -> KVCache:
        """An empty cache for this target. Layers that reuse another layer's keys get empty slabs."""
        heads, dims = [], []
        for layer in self.layers:
            attention = layer.self_attn
            projection = getattr(attention, "k_proj", None)
            heads.append(0 if projection is None else projection.out_features // attention.head_dim)
            dims.append(attention.head_dim)
        return KVCache(self.num_layers, rows, max_length, heads, dims, dtype=self.dtype, device=self.device)

    @torch.no_grad()
    def __call__(
        self,
        tokens_BT: Tensor,
        *,
        lengths_B: Tensor | Sequence[int] | None = None,
        cache: KVCache | None = None,
        taps: bool | Sequence[int] = True,
    ) -> TargetStates:
        """Run right-padded tokens; ``lengths_B`` (≥ 1 each, default T) real ones per row. With a cache they are
        appended at each row's length and the lengths advance. Pass lengths as a list or CPU tensor: a device tensor
        waits. ``taps``: True for this target's, False for none, or ids for another drafter's."""
        rows, width = tokens_BT.shape
        counts = [width] * rows if lengths_B is None else torch.as_tensor(lengths_B).tolist()
        if min(counts) < 1 or max(counts) > width or len(counts) != rows:
            raise TargetError(f"lengths {counts} must name 1…{width} real tokens for each of {rows} rows")
        if cache is not None and cache.rows != rows:
            raise TargetError(f"{rows} rows of tokens for a cache of {cache.rows} active rows")
        plan = RaggedPlan(counts, self.windows, cache, self.device, self.dtype)
        if cache is not None and plan.total > cache.max_length:
            raise TargetError(f"a row of {plan.total} tokens exceeds the cache's max_length {cache.max_length}")
        if cache is not None:
            cache.reserve(plan.total)
        if max(counts) < width:
            tokens_BT = tokens_BT[:, : max(counts)]
        wanted = (
            (self.taps if taps else ()) if isinstance(taps, bool) else families.validate_taps(taps, self.num_layers)
        )
        last, collected = self._run(tokens_BT, plan, wanted)
        if cache is not None:
            cache.advance(counts)
        states = TargetStates(None, plan.unflatten(last))
        if wanted:
            states.taps_BTF = plan.unflatten(torch.cat([collected[tap] for tap in wanted], -1))
        return states

    def _run(self, tokens_BT: Tensor, plan: RaggedPlan, taps: Sequence[int]) -> tuple[Tensor, dict[int, Tensor]]:
        dummy = torch.empty(1, 1, 1, 1, device=self.device, dtype=self.dtype)  # masks come from the plan, see ragged.py
        mask: Any = dummy
        if self.family.masks == "by_type":
            mask = dict.fromkeys((*self.config.layer_types, "full_attention", "sliding_attention"), dummy)
        collected: dict[int, Tensor] = {}
        with self._lock:
            self._collected, self._wanted = collected, frozenset(taps)
            try:
                out = self.decoder(
                    input_ids=plan.flatten(tokens_BT),
                    attention_mask=mask,
                    position_ids=plan.positions,
                    use_cache=plan.cache is not None,
                    ragged=plan,
                    **{self._cache_keyword: RaggedCache(plan) if plan.cache is not None else None},
                )
            finally:
                self._collected, self._wanted = {}, frozenset()
        return out.last_hidden_state, collected

    @torch.no_grad()
    def logits(self, last: Tensor) -> Tensor:
        """fp32 logits [..., V] of post-norm states [..., D]."""
        return cap_logits(matmul_fp32(last, self.head_VD), self.softcap)

    @torch.no_grad()
    def prove_norm_stage(self) -> None:
        """Raise NormStageError unless ``logits(forward(...))`` are the model's own logits on a few tokens."""
        count = min(8, self.config.max_position_embeddings)
        tokens_1T = (torch.arange(count, device=self.device) * 7919 + 3).remainder(self.vocab_size)[None]
        check_norm_stage(self, tokens_1T, self(tokens_1T, taps=False).last_BTD)


@torch.no_grad()
def check_norm_stage(target: Target, tokens_BT: Tensor, last_BTD: Tensor) -> None:
    """Raise NormStageError unless the head maps states to the model's own logits of ``tokens_BT`` (right-padded rows
    must be cut by the caller): the decoder's own states of that forward to 0.1 % of the logits' spread in float32 and
    2 % in half precision, ``last_BTD`` to 0.1 % and 20 %, as its forward has other kernels, whose roundings differ."""
    states: list[Tensor] = []
    hook = target.decoder.register_forward_hook(lambda _module, _inputs, output: states.append(output[0]))
    try:
        own = target.model(input_ids=tokens_BT, use_cache=False).logits.float()
    finally:
        hook.remove()
    half = target.dtype not in (torch.float32, torch.float64)
    for last, tolerance in ((states[-1], 2e-2 if half else 1e-3), (last_BTD, 0.2 if half else 1e-3)):
        ours = target.logits(last.to(target.device, target.dtype))
        error = float((own - ours).square().mean().sqrt() / own.std().clamp_min(1e-12))
        if not error <= tolerance:
            raise NormStageError(
                f"target {target.name} ({target.family.name}): head(last state) differs from the model's own logits by "
                f"{error:.3g} of their spread (allowed {tolerance:g}). The last states must be taken after the final "
                f"norm {target.family.final_norm!r}; if this family scales or shifts its logits, its row in "
                "deepspec/models/families.py is incomplete"
            )
