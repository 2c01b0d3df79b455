"""Builds a target cache: responses → target forward → shards, resumable, by any number of processes.

The forward, the encoding of states and the tokenising of the next shard overlap. Process r of n builds the shards
whose number is r modulo n; whoever finishes last writes the manifest. Processes never talk to each other.
"""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspec.data import record
from deepspec.data.cache import CAPTURE_SEMANTICS, DECODED, MANIFEST, CacheConfig, CacheManifest, Origin
from deepspec.data.cache_reader import CacheReader
from deepspec.data.cache_replace import finished_manifest, outdated_shards, require_captured, require_replace
from deepspec.data.cache_writer import ShardWriter, finalise, finished, read_facts, remove_leftovers, write_shard
from deepspec.data.capture import capture, origin_of, probe
from deepspec.data.capture_plan import (
    Conversation,
    EncodeSettings,
    Responses,
    batches,
    check_usable,
    encode_rows,
)
from deepspec.data.codecs import codec_named
from deepspec.data.estimate import human_bytes, require_space, state_bytes
from deepspec.distributed import is_main, rank, world_size
from deepspec.files import local_path
from deepspec.models.target import Target, TargetConfig

if TYPE_CHECKING:
    from deepspec.data.config import DataPipelineConfig

SAMPLED_ROWS = 200


@dataclass
class Progress:
    """What this process did: tokens and padding of its forwards, seconds spent waiting for each part."""

    tokens: int = 0
    padded: int = 0
    forward_seconds: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class Plan:
    """The shards of a cache: rows of the responses, and an identity that changes with anything a shard depends on."""

    responses: Responses
    ranges: list[tuple[int, int]]
    settings: EncodeSettings
    config: CacheConfig

    @classmethod
    def of(cls, config: CacheConfig, responses: Responses, thinking: bool) -> "Plan":
        """Slices of ``shard_rows`` responses."""
        step = config.shard_rows
        ranges = [(start, min(start + step, len(responses))) for start in range(0, len(responses), step)]
        return cls(responses, ranges, EncodeSettings(thinking, config.max_length, config.keep_truncated), config)

    def key(self, target: TargetConfig) -> str:
        """Fingerprint of everything that can be known without loading the target."""
        parts = [self.responses.digest(start, stop) for start, stop in self.ranges]
        content = [self.config.codec, self.config.log_normaliser, *self._semantics()]
        if self.config.log_normaliser and not codec_named(self.config.codec).lossless:
            content.append(DECODED)  # as in Origin: a lossy cache of an earlier version is not this one
        # how the target samples decided the answers, which are in the parts
        captured = {name: value for name, value in vars(target).items() if name != "sampling"}
        return _digest([captured, vars(self.settings), content, self._layout(), parts])

    def identities(self, origin: Origin) -> list[str]:
        """One fingerprint per shard."""
        return [self.identity(origin, start, stop) for start, stop in self.ranges]

    def identity(self, origin: Origin, start: int, stop: int) -> str:
        """Fingerprint of a shard of responses ``start`` … ``stop − 1``; where the target lies has no part in it."""
        weights = {name: origin.target[name] for name in ("fingerprint", "head", "shape")}
        made = origin.as_dict() | {"target": weights}
        if made["semantics"] == 1:  # shards from before there was a version have none in their identity
            del made["semantics"]
        return _digest([made, vars(self.settings), self._layout(), self.responses.digest(start, stop)])

    def rows(self, shards: list[int]) -> int:
        """Responses in ``shards``."""
        return sum(stop - start for start, stop in (self.ranges[number] for number in shards))

    def _semantics(self) -> list[int]:
        return [] if CAPTURE_SEMANTICS == 1 else [CAPTURE_SEMANTICS]  # as in ``identity``

    def _layout(self) -> list[Any]:
        return [self.config.batch_tokens, self.config.max_padding]


def build_cache(cfg: "DataPipelineConfig", target: Target | None = None) -> CacheManifest | None:
    """Build or complete the cache in ``${out}/${cache.folder}``.

    Returns its manifest, or None when other processes still have shards to build. A second run does only what is
    missing: shards of the same responses, target and settings are kept. Raises before any forward for missing
    responses, those of another target, another thinking mode, an unusable chat template, too little disk space, and
    (CacheMismatchError) a finished cache whose samples would be lost, unless ``cache.replace`` is set.
    """
    folder = local_path(cfg.cache_path)
    responses = Responses(cfg.responses_dir, cfg.cache.limit, cfg.target.name)
    if responses.left_out:
        _say(f"{responses.folder}: {responses.left_out} answers to held-out prompts are left out")
    plan = Plan.of(cfg.cache, responses, cfg.target.thinking)
    key = plan.key(cfg.target)
    if (before := finished_manifest(folder)) is not None:
        require_captured(folder, before)
    if (manifest := _complete(folder, key)) is not None:
        _say(f"{folder} is complete: {manifest.rows} samples, {manifest.tokens} tokens. Nothing to do.")
        return manifest
    if target is None:
        target = Target.load(cfg.target)
    origin = origin_of(
        target,
        codec=cfg.cache.codec,
        thinking=cfg.target.thinking,
        revision=cfg.target.revision,
        log_normaliser=cfg.cache.log_normaliser,
    )
    outdated = outdated_shards(folder, before, plan, origin) if before is not None else {}
    if before is not None:
        require_replace(folder, before, outdated, origin, cfg.cache)
    identities = plan.identities(origin)
    missing = [number for number, done in enumerate(finished(folder, identities)) if not done]
    mine = [number for number in missing if number % world_size() == rank()]
    remove_leftovers(folder, mine)
    tokens = _check_space(folder, plan, target, missing, cfg.cache) * plan.rows(mine) // max(1, plan.rows(missing))
    folder.mkdir(parents=True, exist_ok=True)
    if outdated:  # the manifest must not describe shards that are being replaced
        (folder / MANIFEST).unlink(missing_ok=True)
    progress = _build(folder, plan, target, origin, identities, mine, tokens)
    if not all(finished(folder, identities)):
        print(f"rank {rank()} has built its shards of {folder}; the last rank to finish writes the manifest")
        return None
    kept, dropped = _tally(folder, range(len(identities)))
    check_usable(kept, dropped, plan.responses.folder)  # of all shards, whichever run or rank built them
    if responses.left_out:
        dropped["held out"] = responses.left_out
    manifest = finalise(
        folder,
        len(identities),
        origin,
        {
            "plan": key,
            "cache": vars(cfg.cache),
            "dropped": dict(dropped),
            "answers": {"git_revisions": responses.revisions},
        },
    )
    _report(folder, manifest, progress, dropped)
    return manifest


def _complete(folder: Path, key: str) -> CacheManifest | None:
    """The manifest of a finished cache of this very plan whose shards are all there and are those it describes."""
    try:
        manifest = CacheReader(folder).manifest
    except ValueError:
        return None
    if manifest.settings.get("plan") != key:
        return None
    # a kill after a damaged shard was rebuilt leaves a manifest and an index of the bytes it had before
    found = [read_facts(folder, number) for number in range(len(manifest.shards))]
    same = all(facts is not None and facts.shard == line for facts, line in zip(found, manifest.shards, strict=True))
    return manifest if same else None


def _tally(folder: Path, shards: Iterable[int]) -> tuple[int, Counter[str]]:
    """Samples in finished shards, and how many responses were dropped for which reason."""
    kept, dropped = 0, Counter[str]()
    for number in shards:
        if (facts := read_facts(folder, number)) is not None:
            kept += facts.shard.rows
            dropped.update(facts.dropped)
    return kept, dropped


def _check_space(folder: Path, plan: Plan, target: Target, shards: list[int], config: CacheConfig) -> int:
    """Expected tokens of ``shards``, those of every rank, by encoding an even sample of their rows.

    Raises DiskSpaceError.
    """
    rows = [row for number in shards for row in range(*plan.ranges[number])]
    if not rows:
        return 0
    chosen = rows[:: max(1, len(rows) // SAMPLED_ROWS)]
    sample = [row for index in chosen for row in plan.responses.rows(index, index + 1)]
    kept, dropped = encode_rows(target.tokenizer, sample, plan.settings)
    scale = len(rows) / len(sample)
    # together with the finished shards: the few that are missing may be where one source's unusable rows lie
    usable, unusable = _tally(folder, set(range(len(plan.ranges))).difference(shards))
    unusable.update({reason: round(scale * count) for reason, count in dropped.items()})
    check_usable(usable + round(scale * len(kept)), unusable, plan.responses.folder)
    tokens = int(scale * sum(len(conversation) for conversation in kept))
    states = int(scale * sum(conversation.states for conversation in kept))
    needed = state_bytes(codec_named(config.codec), target.hidden_size, len(target.taps), tokens, states)
    free = require_space(folder, needed, tokens, config)
    _say(
        f"{len(rows)} responses, about {tokens} tokens → {len(shards)} shards, about {human_bytes(needed)} as "
        f"{config.codec} ({human_bytes(free)} free)"
    )
    return tokens


def _build(
    folder: Path, plan: Plan, target: Target, origin: Origin, identities: list[str], shards: list[int], tokens: int
) -> Progress:
    """Build the shards one after the other while the next one is being tokenised."""
    from tqdm import tqdm

    progress, started = Progress(), time.perf_counter()
    bar = tqdm(total=tokens, unit="tok", unit_scale=True, desc="capture", disable=not is_main() or not shards)
    with bar, ThreadPoolExecutor(1, "tokenise") as tokenise, ThreadPoolExecutor(1, "encode") as encode:
        upcoming = _ahead(tokenise, plan, target.tokenizer, shards)
        for number, (conversations, dropped) in zip(shards, upcoming, strict=True):
            with write_shard(folder, number, origin, identities[number]) as writer:
                writer.dropped.update(dropped)
                for batch_tokens in _write(writer, encode, target, conversations, plan.config, progress):
                    bar.update(batch_tokens)
    progress.seconds = time.perf_counter() - started
    return progress


def _ahead(
    pool: ThreadPoolExecutor, plan: Plan, tokenizer: Any, shards: list[int]
) -> Iterator[tuple[list[Conversation], Counter[str]]]:
    """Tokenised shards in order, one of them ahead."""

    def submit(number: int) -> Future[tuple[list[Conversation], Counter[str]]]:
        return pool.submit(lambda: encode_rows(tokenizer, plan.responses.rows(*plan.ranges[number]), plan.settings))

    waiting = [submit(number) for number in shards[:1]]
    for following in [*shards[1:], None]:
        current = waiting.pop() if waiting else None
        if current is None:
            return
        if following is not None:
            waiting.append(submit(following))
        yield current.result()


def _write(
    writer: ShardWriter,
    pool: ThreadPoolExecutor,
    target: Target,
    conversations: list[Conversation],
    config: CacheConfig,
    progress: Progress,
) -> Iterator[int]:
    """Forward batch after batch, at most ``queue_batches`` ahead of encoding and writing; yields tokens per batch."""
    codec = codec_named(writer.origin.codec)

    def store(rows: list[record.Row]) -> None:
        for row in rows:
            writer.add(row.source, record.pack(row, codec, len(target.taps)))

    pending: list[Future[None]] = []
    groups = batches([len(conversation) for conversation in conversations], config.batch_tokens, config.max_padding)
    for group in groups:
        started = time.perf_counter()
        chosen = [conversations[index] for index in group]
        rows = capture(target, chosen, normalisers_for=codec if writer.origin.log_normaliser else None)
        progress.forward_seconds += time.perf_counter() - started
        if not writer.probes:
            writer.probes.append(probe(target, rows[0]))
        pending.append(pool.submit(store, rows))
        if len(pending) > config.queue_batches:
            pending.pop(0).result()
        lengths = [len(conversations[index]) for index in group]
        progress.tokens += sum(lengths)
        progress.padded += max(lengths) * len(lengths)
        yield sum(lengths)
    for future in pending:
        future.result()


def _report(folder: Path, manifest: CacheManifest, progress: Progress, dropped: Counter[str]) -> None:
    hidden, taps = manifest.target["shape"]["hidden_size"], len(manifest.taps)
    raw = 2 * hidden * (taps + 1) * manifest.tokens
    speed = f", {progress.tokens / progress.seconds:.0f} tokens/s" if progress.tokens else ""
    padding = f", padding {1 - progress.tokens / progress.padded:.1%}" if progress.padded else ""
    lost = f"; dropped: {', '.join(f'{count} {reason}' for reason, count in dropped.items())}" if dropped else ""
    print(
        f"{folder}: {manifest.rows} samples, {manifest.tokens} tokens, {human_bytes(manifest.bytes)} "
        f"({manifest.bytes / max(raw, 1):.2f} of raw bfloat16){speed}{padding}{lost}"
    )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _say(text: str) -> None:
    if is_main():
        print(text)
