"""Opens what a run trains on, cache or frozen target, and proves first that it fits the run. Knows no loss, no drafter.

Shapes: I last states of a sample, D hidden size.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
import xxhash

from deepspec.data.batch import Sample
from deepspec.data.cache import CacheConfig, CacheMismatchError, require
from deepspec.data.cache_reader import CacheReader
from deepspec.data.capture import capture, to_sample
from deepspec.data.capture_plan import Conversation, EncodeSettings, Responses, batches, check_usable, encode_rows
from deepspec.data.fingerprints import head_fingerprint, template_fingerprint
from deepspec.data.loader import CacheSource, DataConfig
from deepspec.distributed import is_main
from deepspec.models.frozen_head import FrozenHead
from deepspec.models.target import Target, TargetConfig

# Share of probed next tokens that must be reproduced: quantised states swap near ties. On a real target, states taken
# before the final norm reproduce 17 %.
AGREEMENT: Final = {"bf16": 0.95, "int8": 0.9, "int4": 0.8}
TIE: Final = 2.0**-7  # logits of a bfloat16 head that differ by less are equal
SLICE: Final = 1024  # responses that are in memory as text at a time
MAX_PADDING: Final = CacheConfig().max_padding


def open_cache(
    config: DataConfig,
    target: TargetConfig,
    *,
    head: FrozenHead | None = None,
    text_config: Any = None,
    tokenizer: Any = None,
    fingerprint: str | None = None,
) -> CacheSource:
    """The cache in ``config.path``, after checking that it was made for this target.

    head: the target's embedding and head, to compare fingerprints and to reproduce the target's own next tokens;
    text_config, tokenizer: its Hugging Face text config and tokenizer, to compare shapes and chat template;
    fingerprint: Target.fingerprint where the whole target is loaded. Raises CacheError subclasses that name the remedy.
    """
    reader = CacheReader(config.path)
    require(
        reader.manifest.origin,
        reader.path,
        config=text_config,
        fingerprint=fingerprint,
        template=template_fingerprint(tokenizer) if tokenizer is not None else None,
        head=head_fingerprint(head.head_VD) if head is not None else None,
        taps=target.taps,
        thinking=target.thinking,
    )
    if head is not None:
        prove_head(reader, head)
    if reader.manifest.origin.stale_normalisers and is_main():
        print(
            f"note: {reader.path} is an {reader.codec} cache of an earlier version, whose log-normalisers belong to "
            "the states before encoding: they are ignored, and each step computes its own (slower, not less exact); "
            "`deepspec data cache` with cache.replace=true writes right ones"
        )
    return CacheSource(reader, config.threads)


@torch.inference_mode()
def prove_head(reader: CacheReader, head: FrozenHead) -> float:
    """Share of the manifest's probes whose next token ``head`` reproduces from the cached last states.

    Raises CacheMismatchError when it is too low: the states are then not this head's inputs, but for example those
    before the final norm.
    """
    right = total = 0
    rows = {probe.id: row for row, probe in _rows_of(reader)}
    for probe in reader.manifest.probes:
        if probe.id not in rows:
            continue  # a subset need not hold every probed sample
        last_ID = reader.sample(rows[probe.id]).last_ID[torch.tensor(probe.states)]
        logits_IV = head.logits(last_ID.to(head.device, head.dtype)).float().cpu()
        best_I = logits_IV.amax(-1)
        own_I = logits_IV.gather(-1, torch.tensor(probe.tokens)[:, None])[:, 0]
        right += int((best_I - own_I <= TIE * best_I.abs()).sum())
        total += len(probe.tokens)
    if total and right < AGREEMENT[reader.codec] * total:
        raise CacheMismatchError(
            f"{reader.path}: the head reproduces {right} of {total} of the target's own next tokens from the cached "
            "last states. They are not the head's inputs (taken before the final norm, or of another model): build "
            "the cache again with this target"
        )
    return right / total if total else 1.0


def _rows_of(reader: CacheReader) -> list[tuple[int, Any]]:
    wanted = {probe.id: probe for probe in reader.manifest.probes}
    return [(row, wanted[id]) for row, id in enumerate(reader.ids()) if id in wanted]


class OnlineSource:
    """The samples a lossless cache of the same responses would hold, from the target itself, without a cache: one made
    with the defaults of ``cache.keep_truncated`` and ``cache.limit``.

    ``data.path`` is the responses folder. All responses are tokenised when it opens; states are made when asked for.
    """

    def __init__(
        self, target: Target, folder: str | Path, *, thinking: bool, max_length: int, micro_tokens: int
    ) -> None:
        responses = Responses(Path(folder), target=target.name)
        if responses.left_out and is_main():
            print(f"{folder}: {responses.left_out} answers to held-out prompts are left out")
        settings = EncodeSettings(thinking, max_length, keep_truncated=True)
        found: list[Conversation] = []
        dropped: Counter[str] = Counter()
        for start in range(0, len(responses), SLICE):
            kept, lost = encode_rows(target.tokenizer, responses.rows(start, start + SLICE), settings)
            # 4 bytes a token instead of a list's 40: all of them stay in memory, on every rank
            found += [replace(each, tokens=cast(Sequence[int], np.asarray(each.tokens, np.int32))) for each in kept]
            dropped.update(lost)
        check_usable(len(found), dropped, responses.folder)
        self._conversations: list[Conversation] = sorted(found, key=lambda conversation: conversation.id)
        self._target, self._budget = target, micro_tokens
        self.hidden: int = target.hidden_size
        self.features = target.hidden_size * len(target.taps)

    def ids(self) -> list[str]:
        """All ids, ascending."""
        return [conversation.id for conversation in self._conversations]

    def lengths(self) -> list[int]:
        """Tokens of every sample."""
        return [len(conversation) for conversation in self._conversations]

    def contents(self) -> str:
        """Digest of all tokens; the states are the target's, which is compared by its fingerprint."""
        digest = xxhash.xxh3_128()
        for conversation in self._conversations:
            digest.update(np.asarray(conversation.tokens, np.int32).tobytes())
        return f"online {digest.hexdigest()}"

    def samples(self, rows: Sequence[int]) -> list[Sample]:
        """Run the target over these conversations, in batches of similar length."""
        chosen = [self._conversations[row] for row in rows]
        made: dict[int, Sample] = {}
        for group in batches([len(conversation) for conversation in chosen], self._budget, MAX_PADDING):
            captured = capture(self._target, [chosen[place] for place in group])
            made.update({place: to_sample(row) for place, row in zip(group, captured, strict=True)})
        return [made[place] for place in range(len(chosen))]


def open_online(config: DataConfig, target: Target, thinking: bool) -> OnlineSource:
    """The responses in ``config.path`` through ``target``; raises ResponsesError for none, those of another
    target or another thinking mode."""
    return OnlineSource(
        target, config.path, thinking=thinking, max_length=config.max_length, micro_tokens=config.micro_tokens
    )
