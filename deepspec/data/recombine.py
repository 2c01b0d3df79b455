"""New caches from finished ones: merge several, or keep a part of one. Copies records, never decodes them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from deepspec.data import record
from deepspec.data.cache import CacheManifest, CacheMismatchError, Origin, Probe
from deepspec.data.cache_reader import CacheReader
from deepspec.data.cache_writer import finalise, write_shard
from deepspec.data.order import in_share
from deepspec.files import local_path

Place = tuple[CacheReader, int]


def merge(paths: Sequence[str | Path], out: str | Path, shard_rows: int = 256) -> CacheManifest:
    """One cache with the samples of all; of samples with the same id the first stays.

    Raises CacheMismatchError unless all were made with the same target, taps, codec, template and thinking mode.
    """
    readers = [CacheReader(path) for path in paths]
    for reader in readers[1:]:
        for name in (field.name for field in fields(Origin)):
            value = getattr(reader.manifest.origin, name)
            own = getattr(readers[0].manifest.origin, name)
            if name == "target":  # two copies of one model may lie in different places
                value, own = value["fingerprint"], own["fingerprint"]
            if value != own:
                raise CacheMismatchError(
                    f"{reader.path} and {readers[0].path} differ in {name} ({value} and {own}): only caches of one "
                    "target with the same settings can be merged"
                )
    places: dict[str, Place] = {}
    for reader in readers:
        for row, id in enumerate(reader.ids()):
            places.setdefault(id, (reader, row))
    return _copy(
        [places[id] for id in sorted(places)], local_path(out), shard_rows, [reader.path for reader in readers]
    )


def subset(path: str | Path, out: str | Path, keep: Callable[[str, str], bool], shard_rows: int = 256) -> CacheManifest:
    """The samples for which ``keep(id, source)`` holds. Raises CacheMismatchError when there are none."""
    reader = CacheReader(path)
    rows = [row for row, id in enumerate(reader.ids()) if keep(id, reader.source(row))]
    if not rows:
        raise CacheMismatchError(f"no sample of {path} is wanted: check the ids or sources asked for")
    return _copy([(reader, row) for row in rows], local_path(out), shard_rows, [reader.path])


def chooser(
    sources: Sequence[str] | None = None, ids_file: str | Path | None = None, share: float = 1.0
) -> Callable[[str, str], bool]:
    """``keep`` for ``subset`` from what the command line gives; all conditions must hold.

    ``ids_file`` has one id per line; an id may hold spaces.
    """
    wanted = set(Path(ids_file).read_text(encoding="utf-8").splitlines()) if ids_file else None

    def keep(id: str, source: str) -> bool:
        return (
            (wanted is None or id in wanted)
            and (not sources or source in sources)
            and (share >= 1.0 or in_share(f"subset\x00{id}", share))
        )

    return keep


def _copy(places: Sequence[Place], out: Path, shard_rows: int, parents: list[str]) -> CacheManifest:
    if any(out.glob("shard-*")):
        raise CacheMismatchError(f"{out} already holds shards: give an empty folder")
    out.mkdir(parents=True, exist_ok=True)
    origin = places[0][0].manifest.origin
    starts = range(0, len(places), shard_rows)
    for number, start in enumerate(starts):
        chosen = places[start : start + shard_rows]
        with write_shard(out, number, origin, identity=f"copy {number}") as writer:
            for reader, row in chosen:
                writer.add(reader.source(row), _checked(reader, row))
            writer.probes += _probes(chosen)
    return finalise(out, len(starts), origin, {"parents": parents})


def _probes(places: Sequence[Place]) -> Iterator[Probe]:
    known: dict[int, dict[str, Probe]] = {}
    for reader, row in places:
        probes = known.setdefault(id(reader), {probe.id: probe for probe in reader.manifest.probes})
        if reader.id(row) in probes:
            yield probes[reader.id(row)]


def _checked(reader: CacheReader, row: int) -> bytes:
    packed = reader.record(row)
    try:
        record.check(packed)
    except record.RecordError as error:
        raise reader.damaged(row, str(error)) from error
    return packed
