"""Versions of the rules behind answers and states: others are refused, and what says none is of version 1."""

import json
import re

import pyarrow.parquet as pq
import pytest

from deepspec.data import cache as cache_format
from deepspec.data import cache_build, capture, regenerate, responses
from deepspec.data.cache import CacheMismatchError
from deepspec.data.cache_reader import CacheReader
from deepspec.data.capture_plan import Responses
from deepspec.data.regenerate import RegenerateConfig
from deepspec.data.responses import ResponsesError, part_files, part_provenance, read_responses
from deepspec.files import provenance
from tests.data.little_chat import built, chat_target, pipeline
from tests.data.scripted_engine import STAMP, ScriptedEngine

PROMPTS = [{"id": f"p{n}", "messages": [{"role": "user", "content": "x"}], "source": "s"} for n in range(6)]
REVISION = re.compile("[0-9a-f]{40}")


def answered(folder, stamp=STAMP):
    return regenerate.regenerate(PROMPTS, folder, stamp, ScriptedEngine, RegenerateConfig(flush_completions=4))


def without_version(folder):
    """As a folder of answers was written before there were versions."""
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["stamp"]["semantics"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    for part in part_files(folder):
        pq.write_table(pq.read_table(part).replace_schema_metadata(None), part)


def test_every_part_says_which_code_made_it(tmp_path):
    answered(tmp_path)
    parts = part_files(tmp_path)
    assert len(parts) == 2
    for part in parts:
        made = part_provenance(part)
        assert made["semantics"] == responses.ANSWER_SEMANTICS
        assert made["versions"] == provenance()["versions"]
        assert made["git_revision"] == provenance()["git_revision"]
    assert REVISION.fullmatch(Responses(tmp_path).revisions[0])


def test_answers_from_before_there_were_versions_are_version_1(tmp_path):
    answered(tmp_path)
    without_version(tmp_path)
    assert answered(tmp_path).done == len(PROMPTS)
    assert len(list(read_responses(tmp_path))) == len(PROMPTS)
    assert Responses(tmp_path).revisions == ["unknown"]


@pytest.mark.parametrize("old", [False, True], ids=["version 1", "no version"])
def test_answers_of_other_rules_are_neither_continued_nor_captured(tmp_path, monkeypatch, old):
    answered(tmp_path)
    if old:
        without_version(tmp_path)
    monkeypatch.setattr(responses, "ANSWER_SEMANTICS", 2)
    refused = r"version 1 of the rules .* has version 2.*another out=…"
    with pytest.raises(ResponsesError, match=refused):
        answered(tmp_path)
    with pytest.raises(ResponsesError, match=refused):
        Responses(tmp_path)


@pytest.fixture
def finished(tmp_path):
    """A finished cache and its target."""
    target = chat_target()
    built(tmp_path, 12, target)
    return tmp_path, target


def manifest_of(folder):
    return json.loads((folder / "cache" / "manifest.json").read_text())


def test_every_shard_says_which_code_built_it(finished):
    folder, _ = finished
    manifest = manifest_of(folder)
    assert manifest["origin"]["semantics"] == cache_format.CAPTURE_SEMANTICS
    assert all(shard["git_revision"] == provenance()["git_revision"] for shard in manifest["shards"])
    assert manifest["settings"]["answers"]["git_revisions"]


def test_a_cache_from_before_there_were_versions_is_complete_and_readable(finished):
    folder, _ = finished
    manifest = manifest_of(folder)
    del manifest["origin"]["semantics"]
    for shard in manifest["shards"]:
        del shard["git_revision"]
        facts = folder / "cache" / shard["file"].replace(".parquet", ".json")
        plain = json.loads(facts.read_text())
        del plain["shard"]["git_revision"]
        facts.write_text(json.dumps(plain))
    (folder / "cache" / "manifest.json").write_text(json.dumps(manifest))
    reader = CacheReader(folder / "cache")
    cache_format.require(reader.manifest.origin, "the cache")
    assert reader.manifest.origin.semantics == 1
    assert cache_build.build_cache(pipeline(folder), target=None) is not None  # complete: no target is loaded


def test_states_of_other_rules_are_neither_trained_on_nor_kept_in_silence(finished, monkeypatch):
    folder, target = finished
    origin = CacheReader(folder / "cache").manifest.origin
    for module in (cache_format, cache_build, capture):
        monkeypatch.setattr(module, "CAPTURE_SEMANTICS", 2)
    with pytest.raises(CacheMismatchError, match=r"by version 1 of the rules .* has version 2.*cache\.replace=true"):
        cache_format.require(origin, "the cache")
    with pytest.raises(CacheMismatchError, match="version of the rules for states 1 there, 2 here"):
        cache_build.build_cache(pipeline(folder), target)
