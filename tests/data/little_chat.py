"""A tiny target with a chat tokenizer, answered conversations for it, and caches of them. No hub."""

import random
from pathlib import Path

from deepspec.data.cache import CacheConfig
from deepspec.data.cache_build import build_cache
from deepspec.data.config import DataPipelineConfig
from deepspec.data.responses import Response, write_part
from deepspec.models.target import Target, TargetConfig
from tests.tiny import tiny_model

VOCAB = 128
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def chat_tokenizer(template: str = TEMPLATE):
    """One token per printable character, and <s>, </s>."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    characters = ["\n", *map(chr, range(32, 127))]
    vocabulary = {text: number for number, text in enumerate(["<s>", "</s>", "<unk>", *characters])}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = template
    return tokenizer


def chat_target(seed: int = 0, taps=None, template: str = TEMPLATE, **overrides) -> Target:
    """Four layers, width 32, and a tokenizer."""
    model = tiny_model("qwen3", seed, vocab_size=VOCAB, **overrides)
    return Target.from_model(model, tokenizer=chat_tokenizer(template), taps=taps, name="tiny-chat")


def answered(count: int, seed: int = 0, prefix: str = "r") -> list[Response]:
    """Conversations whose answers end with the end of turn, of very different lengths."""
    draw = random.Random(seed)
    letters = "abcdefghij klmnop"
    rows = []
    for number in range(count):
        text = "".join(draw.choices(letters, k=draw.randint(1, 60)))
        answer = [draw.randint(3, 90) for _ in range(draw.randint(2, 40))] + [1]
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "as generated"}]
        rows.append(Response(f"{prefix}{number:03d}", messages, "stop", False, {}, answer, "made-up"))
    return rows


def pipeline(folder: Path, responses: list[Response] | None = None, **cache) -> DataPipelineConfig:
    """A pipeline with its responses written, in two parts."""
    cfg = DataPipelineConfig(
        TargetConfig("tiny-chat", "none", dtype="float32"),
        out=str(folder),
        cache=CacheConfig(**{"shard_rows": 4, "batch_tokens": 128, **cache}),
    )
    if responses is not None:
        half = len(responses) // 2
        write_part(cfg.responses_dir / "part-000-000000.parquet", responses[:half])
        write_part(cfg.responses_dir / "part-000-000001.parquet", responses[half:])
    return cfg


def built(folder: Path, count: int = 18, target: Target | None = None, **cache) -> DataPipelineConfig:
    """A finished cache of ``count`` conversations."""
    cfg = pipeline(folder, answered(count), **cache)
    assert build_cache(cfg, target or chat_target()) is not None
    return cfg
