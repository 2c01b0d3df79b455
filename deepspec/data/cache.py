"""The target cache's format: configuration, Parquet schema, manifest, and what must agree before it is used.

Knows no models and reads no hidden states.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa

from deepspec.data.codecs import codec_named

FORMAT: Final = "deepspec-target-cache"
SCHEMA_VERSION: Final = 1
DECODED: Final = "decoded"
NORM_STAGE: Final = "post"
# Version of what a record's numbers mean: which tokens of a conversation are captured, at which layers and after which
# norm, at which positions, how they are derived. Raise it when a change in capture.py, capture_plan.py or the target's
# forward gives the same samples other states (beyond rounding): caches of before are then refused. 1 is also the
# version of caches that do not say one.
CAPTURE_SEMANTICS: Final = 1
MANIFEST: Final = "manifest.json"
INDEX: Final = "index.parquet"
SHAPE_KEYS: Final = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
)
SHARD_SCHEMA: Final = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("n_tokens", pa.int32(), nullable=False),
        pa.field("n_last", pa.int32(), nullable=False),
        pa.field("spans", pa.list_(pa.struct([("start", pa.int32()), ("end", pa.int32())])), nullable=False),
        pa.field("tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("checksum", pa.uint64(), nullable=False),
        pa.field("record", pa.large_binary(), nullable=False),
    ]
)
INDEX_SCHEMA: Final = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("n_tokens", pa.int32(), nullable=False),
        pa.field("n_last", pa.int32(), nullable=False),
        pa.field("shard", pa.int32(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("length", pa.int64(), nullable=False),
    ]
)


class CacheError(ValueError):
    """A cache that cannot be used; the message says why and what to do."""


class CacheMissingError(CacheError):
    """No finished cache where one was expected."""


class CacheVersionError(CacheError):
    """A cache written by a newer version."""


class CacheMismatchError(CacheError):
    """A cache made for another target, other taps, another chat template or thinking mode."""


class CacheDamagedError(CacheError):
    """Bytes of the cache changed or are missing; the message names the shard."""


class DiskSpaceError(CacheError):
    """The estimate exceeds the free space."""


@dataclass
class CacheConfig:
    """How a target cache is built. Lengths and sizes count tokens unless they say rows.

    ``shard_rows`` is the unit of resume: a killed build loses at most one shard per rank. ``batch_tokens`` bounds one
    target forward (padding included) and ``max_padding`` the share of it that may be padding. ``queue_batches`` is how
    far the forward may run ahead of encoding and writing. ``log_normaliser`` stores the log-normaliser and the most
    likely token of p, 8 bytes per last state and one product with the head here: training with a reduced draft
    vocabulary then needs the target's logits on that vocabulary alone. ``replace`` lets a build remove or replace
    shards of a finished cache made from other samples, another target or other settings; without it that is an error.
    """

    folder: str = "cache"
    codec: str = "bf16"
    max_length: int = 4096
    shard_rows: int = 256
    batch_tokens: int = 16384
    max_padding: float = 0.05
    limit: int | None = None
    keep_truncated: bool = True
    queue_batches: int = 2
    log_normaliser: bool = False
    ignore_disk_space: bool = False
    remove_damaged: bool = False
    replace: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for values that cannot work."""
        codec_named(self.codec)
        for name in ("max_length", "shard_rows", "batch_tokens", "queue_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"cache.{name} is {getattr(self, name)}: give at least 1")
        if not 0.0 <= self.max_padding < 1.0:
            raise ValueError(f"cache.max_padding is {self.max_padding}: give a share in [0, 1)")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"cache.limit is {self.limit}: give at least 1, or null for everything")


@dataclass
class Origin:
    """What every sample of a cache has in common, and what a user of the cache must agree with.

    ``target`` has name, path, revision, fingerprint, head (fingerprint of the head) and shape (SHAPE_KEYS of its
    config); ``template`` is the fingerprint of tokenizer and chat template. ``normaliser_states`` says of lossy caches
    with log-normalisers which states these are of: "decoded"; "" in caches of earlier versions, whose normalisers are
    of the states before they were encoded, and in lossless ones, where that is the same.
    """

    target: dict[str, Any]
    taps: list[int]
    thinking: bool
    template: str
    codec: str
    norm_stage: str = NORM_STAGE
    log_normaliser: bool = False
    normaliser_states: str = ""
    semantics: int = 1  # not CAPTURE_SEMANTICS: a manifest without one is of version 1

    @property
    def stale_normalisers(self) -> bool:
        """Whether the stored log-normalisers are of other states than a reader decodes, so that they are ignored."""
        lossy = not codec_named(self.codec).lossless
        return self.log_normaliser and lossy and self.normaliser_states != DECODED

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON. An empty ``normaliser_states`` is left out: shards keep the identity they had."""
        values = dataclasses.asdict(self)
        if not self.normaliser_states:
            del values["normaliser_states"]
        return values


@dataclass
class Shard:
    """A shard's line in the manifest. ``identity`` fingerprints the samples and settings it was built from;
    ``git_revision`` is that of the code which built it, which later shards of the cache need not share."""

    file: str
    rows: int
    tokens: int
    states: int
    bytes: int
    checksum: str
    identity: str
    git_revision: str | None = None


@dataclass
class Probe:
    """Next tokens by the target's own head at some positions of one sample, to prove that a head and a cache agree."""

    id: str
    states: list[int]  # rows of last_ID
    tokens: list[int]


@dataclass
class CacheManifest:
    """manifest.json: written last, so a folder without one is not finished; what it describes may be damaged later."""

    origin: Origin
    shards: list[Shard]
    index_checksum: str
    probes: list[Probe]
    settings: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def target(self) -> dict[str, Any]:
        """Name, path, revision, fingerprint … of the target."""
        return self.origin.target

    @property
    def taps(self) -> tuple[int, ...]:
        """Tapped layers, ascending."""
        return tuple(self.origin.taps)

    @property
    def thinking(self) -> bool:
        """Whether the conversations were rendered in thinking mode."""
        return self.origin.thinking

    @property
    def codec(self) -> str:
        """Name of the codec of all records."""
        return self.origin.codec

    @property
    def parents(self) -> list[str]:
        """The caches that this one was merged or cut out of; none for one that was captured."""
        return self.settings.get("parents", [])

    @property
    def repair(self) -> str:
        """How to get missing or damaged files back."""
        return _again(self.parents)

    @property
    def rows(self) -> int:
        """Samples in the cache."""
        return sum(shard.rows for shard in self.shards)

    @property
    def tokens(self) -> int:
        """Tokens in the cache."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.bytes for shard in self.shards)

    def to_json(self) -> dict[str, Any]:
        """The manifest as plain values."""
        totals = {"rows": self.rows, "tokens": self.tokens, "bytes": self.bytes}
        fields = dataclasses.asdict(self) | {"origin": self.origin.as_dict()}
        return {"format": FORMAT, "schema_version": SCHEMA_VERSION, "totals": totals, **fields}

    @classmethod
    def from_json(cls, text: str, where: str) -> "CacheManifest":
        """Parse a manifest; raises CacheVersionError for a newer schema, CacheDamagedError for anything unreadable."""
        try:
            plain = json.loads(text)
        except json.JSONDecodeError as error:
            raise CacheDamagedError(
                f"{where}/{MANIFEST} is not valid JSON ({error}): delete it and run the cache command again, "
                "finished shards are kept (merge or subset again what they made)"
            ) from error
        if not isinstance(plain, dict) or plain.get("format") != FORMAT:
            raise CacheDamagedError(f"{where}/{MANIFEST} is not the manifest of a target cache: check the path")
        if plain["schema_version"] > SCHEMA_VERSION:
            raise CacheVersionError(
                f"{where} has schema version {plain['schema_version']}, this deepspec reads up to {SCHEMA_VERSION}: "
                "update deepspec, or build the cache again with this version"
            )
        try:
            return cls(
                origin=Origin(**plain["origin"]),
                shards=[Shard(**shard) for shard in plain["shards"]],
                index_checksum=plain["index_checksum"],
                probes=[Probe(**probe) for probe in plain["probes"]],
                settings=plain["settings"],
                provenance=plain["provenance"],
            )
        except (KeyError, TypeError) as error:
            settings = plain.get("settings")
            parents = settings.get("parents", []) if isinstance(settings, dict) else []
            raise CacheDamagedError(
                f"{where}/{MANIFEST} lacks or has an unknown field ({error}): "
                + (_again(parents) if parents else f"delete it and {_again([])}")
            ) from error


def shard_name(number: int) -> str:
    """File name of a shard; its facts are beside it under the same stem with ``.json``."""
    return f"shard-{number:05d}.parquet"


def _again(parents: list[str]) -> str:
    if parents:
        return f"delete the folder and merge or subset it again from {', '.join(parents)}"
    return "run the cache command again, whole shards are kept"


def shape_of(config: Any) -> dict[str, Any]:
    """SHAPE_KEYS of a Hugging Face text config."""
    return {key: getattr(config, key, None) for key in SHAPE_KEYS}


def require(
    origin: Origin,
    where: str,
    *,
    config: Any = None,
    fingerprint: str | None = None,
    head: str | None = None,
    taps: tuple[int, ...] | list[int] | None = None,
    thinking: bool | None = None,
    template: str | None = None,
) -> None:
    """Raise CacheMismatchError unless the cache was made as its user needs it; what is None is not checked.

    config: Hugging Face text config; head and template: fingerprints of deepspec.data.fingerprints.
    """
    again = "use that one, or build a cache for this one in another folder (out=…)"
    name = origin.target["name"]
    if config is not None and (differing := _differences(origin.target["shape"], shape_of(config))):
        raise CacheMismatchError(f"{where} was built for target {name}, not for this one ({differing}): {again}")
    for kind, stored, wanted in (
        ("", origin.target["fingerprint"], fingerprint),
        ("head ", origin.target["head"], head),
    ):
        if wanted is not None and stored != wanted:
            raise CacheMismatchError(
                f"{where} was built for target {name} with other weights ({kind}fingerprint {stored[:12]}, "
                f"here {wanted[:12]}): {again}"
            )
    if origin.norm_stage != NORM_STAGE:
        raise CacheMismatchError(
            f"{where} holds last states at stage {origin.norm_stage!r}, training needs {NORM_STAGE!r} (after the final "
            "norm): build the cache again"
        )
    if origin.semantics != CAPTURE_SEMANTICS:
        raise CacheMismatchError(
            f"{where} was captured by version {origin.semantics} of the rules for states, this deepspec has version "
            f"{CAPTURE_SEMANTICS}, by which the same samples have other states: build the cache again "
            "(cache.replace=true, or another cache.folder)"
        )
    if taps is not None and list(taps) != list(origin.taps):
        raise CacheMismatchError(
            f"{where} holds taps {list(origin.taps)}, this run asks for {list(taps)}: set target.taps to the cache's, "
            "or build another cache"
        )
    if thinking is not None and thinking != origin.thinking:
        raise CacheMismatchError(
            f"{where} was built with target.thinking={str(origin.thinking).lower()}, this run has "
            f"target.thinking={str(thinking).lower()}: a drafter must be trained in the mode it is used in; {again}"
        )
    if template is not None and template != origin.template:
        raise CacheMismatchError(
            f"{where} was built with another tokenizer or chat template (fingerprint {origin.template[:12]}, "
            f"here {template[:12]}): {again}"
        )


def _differences(stored: dict[str, Any], here: dict[str, Any]) -> str:
    return ", ".join(
        f"{key} {value} there, {here[key]} here" for key, value in stored.items() if key in here and here[key] != value
    )
