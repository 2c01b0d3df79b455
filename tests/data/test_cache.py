"""The manifest and what must agree before a cache is used."""

import json

import pytest

from deepspec.data.cache import (
    CacheConfig,
    CacheDamagedError,
    CacheManifest,
    CacheMismatchError,
    CacheVersionError,
    Origin,
    Probe,
    Shard,
    require,
)

SHAPE = {"model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 4, "vocab_size": 128}


class Config:
    model_type, hidden_size, num_hidden_layers, vocab_size = "qwen3", 32, 4, 128
    num_attention_heads, num_key_value_heads, intermediate_size = 4, 2, 48


def origin(**changes) -> Origin:
    target = {"name": "a", "path": None, "revision": None, "fingerprint": "f" * 64, "head": "h" * 64, "shape": SHAPE}
    fields = {"target": target, "taps": [0, 1], "thinking": False, "template": "t" * 64, "codec": "bf16"}
    return Origin(**{**fields, **changes})


def manifest() -> CacheManifest:
    shards = [
        Shard("shard-00000.parquet", 2, 10, 6, 100, "c", "i"),
        Shard("shard-00001.parquet", 1, 5, 3, 50, "d", "j"),
    ]
    return CacheManifest(origin(), shards, "x", [Probe("r1", [0, 1], [5, 6])], {"plan": "p"}, {})


def test_manifest_round_trip_and_totals():
    plain = manifest().to_json()
    assert plain["totals"] == {"rows": 3, "tokens": 15, "bytes": 150}
    assert CacheManifest.from_json(json.dumps(plain), "x") == manifest()


def test_newer_schema_is_refused_with_the_remedy():
    plain = {**manifest().to_json(), "schema_version": 99}
    with pytest.raises(CacheVersionError, match=r"version 99.*update deepspec"):
        CacheManifest.from_json(json.dumps(plain), "some/cache")


@pytest.mark.parametrize("text", ["{", '{"format": "other"}', "[]"])
def test_unreadable_manifests_name_the_file(text):
    with pytest.raises(CacheDamagedError, match=r"some/cache/manifest\.json"):
        CacheManifest.from_json(text, "some/cache")


def test_manifest_without_a_field_is_damaged():
    plain = manifest().to_json()
    del plain["shards"]
    with pytest.raises(CacheDamagedError, match="shards"):
        CacheManifest.from_json(json.dumps(plain), "x")


def test_everything_that_agrees_is_accepted():
    require(
        origin(),
        "x",
        config=Config(),
        fingerprint="f" * 64,
        head="h" * 64,
        taps=(0, 1),
        thinking=False,
        template="t" * 64,
    )
    require(origin(), "x")


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"fingerprint": "0" * 64}, "target a with other weights.*out="),
        ({"head": "0" * 64}, "other weights.*head fingerprint"),
        ({"taps": [0, 2]}, r"taps \[0, 1\].*\[0, 2\].*target.taps"),
        ({"thinking": True}, "target.thinking=false.*target.thinking=true"),
        ({"template": "0" * 64}, "chat template"),
    ],
)
def test_each_mismatch_is_named_with_a_remedy(wanted, message):
    with pytest.raises(CacheMismatchError, match=message):
        require(origin(), "some/cache", **wanted)


def test_another_target_is_named_by_what_differs():
    class Wider(Config):
        hidden_size = 64

    with pytest.raises(CacheMismatchError, match="hidden_size 32 there, 64 here"):
        require(origin(), "x", config=Wider())


def test_states_before_the_norm_are_refused():
    with pytest.raises(CacheMismatchError, match=r"'pre'.*after the final norm"):
        require(origin(norm_stage="pre"), "x")


@pytest.mark.parametrize(
    ("option", "value"),
    [("codec", "int7"), ("shard_rows", 0), ("batch_tokens", 0), ("max_padding", 1.0), ("limit", 0), ("max_length", 0)],
)
def test_options_out_of_range_are_named(option, value):
    with pytest.raises(ValueError, match=f"{option}|{value}"):
        CacheConfig(**{option: value})
