"""What a cache holds and whether it is still what was written. Reads caches; knows no models."""

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from deepspec.data import record
from deepspec.data.cache import CacheDamagedError, CacheManifest
from deepspec.data.cache_reader import CacheReader
from deepspec.data.cache_writer import facts_path
from deepspec.data.chat import Encoded
from deepspec.data.estimate import human_bytes
from deepspec.data.preview import as_text
from deepspec.files import local_path

if TYPE_CHECKING:
    from deepspec.data.config import DataPipelineConfig


@dataclass(frozen=True)
class Damage:
    """One shard, the sample where it shows (None: the whole file), and how."""

    shard: str
    sample: str | None
    reason: str

    def __str__(self) -> str:
        where = self.shard if self.sample is None else f"{self.shard}, sample {self.sample}"
        return f"{where}: {self.reason}"


def inspect(cfg: "DataPipelineConfig") -> None:
    """Print a summary of the cache in ``${out}/${cache.folder}`` and one sample with supervised tokens marked."""
    reader = CacheReader(cfg.cache_path)
    print("\n".join(describe(reader)))
    print(render(reader, _tokenizer(reader.manifest), colour=sys.stdout.isatty()))


def describe(reader: CacheReader) -> list[str]:
    """Lines for people: origin, sizes, lengths, sources, provenance."""
    manifest, lengths = reader.manifest, reader.tokens
    target, shape = manifest.target, manifest.target["shape"]
    tokens, states = int(lengths.sum()), int(reader.states.sum())
    raw = 2 * shape["hidden_size"] * (len(manifest.taps) + 1) * tokens
    sources = Counter(reader.source(row) or "unnamed" for row in range(len(reader)))
    quantiles = np.quantile(lengths, [0, 0.5, 0.9, 1]).astype(int).tolist() if len(lengths) else []
    versions = manifest.provenance.get("versions", {})
    finished_by = manifest.provenance.get("git_revision")
    revisions = {shard.git_revision or finished_by or "unknown" for shard in manifest.shards} or {"unknown"}
    return [
        f"{reader.path}",
        f"  target     {target['name']} ({shape['model_type']}, {shape['num_hidden_layers']} layers, hidden size "
        f"{shape['hidden_size']}), fingerprint {target['fingerprint'][:12]}",
        f"  taps       {', '.join(map(str, manifest.taps))}; last states after the final norm",
        f"  thinking   {'on' if manifest.thinking else 'off'}",
        f"  samples    {len(reader)} in {len(manifest.shards)} shards",
        f"  tokens     {tokens}, {states} before a supervised token ({states / max(tokens, 1):.0%})",
        f"  lengths    shortest {quantiles[0]}, median {quantiles[1]}, 90 % {quantiles[2]}, longest {quantiles[3]}"
        if quantiles
        else "  lengths    none",
        f"  size       {human_bytes(manifest.bytes)} as {manifest.codec}, {manifest.bytes / max(raw, 1):.3f} of raw "
        f"bfloat16 ({human_bytes(raw)}), {manifest.bytes / max(tokens, 1):.0f} bytes per token",
        f"  sources    {', '.join(f'{name} {count}' for name, count in sources.most_common())}",
        *_normaliser_line(manifest),
        f"  dropped    {', '.join(f'{n} {why}' for why, n in manifest.settings.get('dropped', {}).items()) or 'none'}",
        f"  made with  deepspec {versions.get('deepspec')}, torch {versions.get('torch')}, revision "
        f"{', '.join(sorted(revision[:12] for revision in revisions))}",
    ]


def render(reader: CacheReader, tokenizer: Any, row: int = 0, *, colour: bool) -> str:
    """A sample's text with its supervised tokens green, or in ⟦brackets⟧ without colour."""
    if not len(reader):
        return "no samples"
    sample = reader.sample(row)
    spans = _spans(sample.supervised_S.tolist())
    text = as_text(tokenizer, Encoded(sample.tokens_S.tolist(), spans), colour)
    return f"── {sample.id}  {len(sample)} tokens, {int(sample.supervised_S.sum())} supervised\n{text}"


def _spans(mask: list[bool]) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff([False, *mask, False])).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _normaliser_line(manifest: CacheManifest) -> list[str]:
    """Whether training can use the stored log-normalisers; nothing for a cache without any."""
    if not manifest.origin.log_normaliser:
        return []
    if manifest.origin.stale_normalisers:
        return ["  log Z      of the states before encoding (an earlier version): ignored, training computes its own"]
    return ["  log Z      stored, of the states that a reader decodes"]


def _tokenizer(manifest: CacheManifest) -> Any:
    from deepspec.models.target import TargetConfig, load_tokenizer, resolve

    target = manifest.target
    path = resolve(TargetConfig(name=target["name"], path=target["path"] or target["name"]))
    return load_tokenizer(path, target["revision"])


def verify(cfg: "DataPipelineConfig") -> None:
    """Check every byte of a cache in a folder. Raises CacheDamagedError naming each damaged shard and its remedy, and
    ValueError for a URL.

    With ``cache.remove_damaged`` damaged shards are deleted, so that the cache command rebuilds just those; not those
    of a merged or subset cache, which only its parents can give back.
    """
    from tqdm import tqdm

    reader = CacheReader(local_path(cfg.cache_path))
    bar = tqdm(total=reader.manifest.bytes, unit="B", unit_scale=True, desc="verify")
    with bar:
        found = list(damages(reader, bar.update))
    if not found:
        print(f"{reader.path}: {len(reader)} samples in {len(reader.manifest.shards)} shards, every byte as written")
        return
    names = list(dict.fromkeys(damage.shard for damage in found))
    if reader.manifest.parents:
        remedy = reader.manifest.repair
    elif cfg.cache.remove_damaged:
        for name in names:
            path = Path(reader.path) / name
            path.unlink(missing_ok=True)
            facts_path(path).unlink(missing_ok=True)
        remedy = "removed; run `python -m deepspec.data cache` with the same options: only these are rebuilt"
    else:
        again = "run verify again with cache.remove_damaged=true, then `python -m deepspec.data cache`"
        remedy = f"{again}: only these are rebuilt"
    lines = "\n".join(f"  {damage}" for damage in found)
    raise CacheDamagedError(f"{reader.path}: {len(names)} damaged of {len(reader.manifest.shards)}\n{lines}\n{remedy}")


def damages(reader: CacheReader, progress: Any = lambda count: None) -> Iterator[Damage]:
    """Every damaged shard: missing, of the wrong size, or with other bytes; with the samples whose records changed."""
    for number, shard in enumerate(reader.manifest.shards):
        path = Path(reader.path) / shard.file
        if not path.is_file():
            yield Damage(shard.file, None, "missing")
            continue
        size = path.stat().st_size
        if size != shard.bytes:
            yield Damage(shard.file, None, f"{size} bytes instead of {shard.bytes}: it was cut or overwritten")
            continue
        if _checksum(path, progress) != shard.checksum:
            samples = list(_changed_records(reader, number))
            yield from (Damage(shard.file, id, reason) for id, reason in samples)
            if not samples:
                yield Damage(shard.file, None, "its metadata changed, the records are whole")


def _changed_records(reader: CacheReader, number: int) -> Iterator[tuple[str, str]]:
    for row in reader.rows_of(number):
        try:
            record.check(reader.record(row))
        except ValueError as error:
            yield reader.id(row), str(error)


def _checksum(path: Path, progress: Any) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 22):
            digest.update(chunk)
            progress(len(chunk))
    return digest.hexdigest()
