"""Drafters and targets are found by the rules that the help text states."""

import json
import os

import pytest

from deepspec import recipes
from deepspec.eval import choose


def checkpoint(folder, age=0, **fields):
    folder.mkdir(parents=True)
    config = {"architectures": ["Qwen3DSparkModel"], "block_size": 7, "vocab_size": 97, **fields}
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    os.utime(path, (1e9 - age, 1e9 - age))
    return folder


def test_the_newest_run_is_found_and_its_best_checkpoint_taken(tmp_path):
    checkpoint(tmp_path / "t" / "drafters" / "old" / "best", age=100)
    checkpoint(tmp_path / "t" / "drafters" / "new" / "best", age=50)
    checkpoint(tmp_path / "t" / "drafters" / "new" / "last", age=10)
    assert choose.newest_drafter(tmp_path) == tmp_path / "t" / "drafters" / "new" / "best"


def test_labels_come_from_the_recipe_and_stay_apart(tmp_path):
    names = [tmp_path / run / "drafters" / "dspark" for run in ("a", "b")]
    for name in names:
        checkpoint(name / "last")
    plain = checkpoint(tmp_path / "mine")
    found = choose.candidates([str(name) for name in (*names, plain)])
    assert [item.label for item in found] == ["dspark", "dspark-2", "mine"]
    assert [item.folder.name for item in found] == ["last", "last", "mine"]


def test_a_label_that_is_a_folder_s_name_already_is_not_given_again(tmp_path):
    names = ["a/dspark-2", "a/dspark", "b/dspark", "a/ngram"]
    found = choose.candidates([str(checkpoint(tmp_path / name)) for name in names])
    assert [item.label for item in found] == ["dspark-2", "dspark", "dspark-3", "ngram-2"]


@pytest.mark.parametrize(
    ("fields", "kind", "confidence"),
    [
        ({"markov_rank": 256, "enable_confidence_head": True}, "dspark", True),
        ({"markov_rank": 256}, "dspark", False),
        ({"markov_rank": 0}, "dflash", False),
        ({"architectures": ["Qwen3Eagle3Model"]}, "eagle3", False),
        ({"deepspec": {"kind": "dflash"}}, "dflash", False),
    ],
)
def test_kinds_of_published_and_own_checkpoints(tmp_path, fields, kind, confidence):
    (item,) = choose.candidates([str(checkpoint(tmp_path / "x", **fields))])
    assert (item.kind, item.confidence) == (kind, confidence)


def test_the_fingerprint_follows_the_weights(tmp_path):
    (item,) = choose.candidates([str(checkpoint(tmp_path / "x"))])
    (tmp_path / "x" / "model.safetensors").write_bytes(b"one")
    first = item.fingerprint()
    assert item.fingerprint() == first
    (tmp_path / "x" / "model.safetensors").write_bytes(b"two")
    assert item.fingerprint() != first


def test_targets_by_recipe_folder_hub_id_and_record(tmp_path):
    assert "qwen3-4b" in recipes.names("target")
    named = choose.target_config("qwen3-4b", [], "auto", True)
    assert (named.name, named.path, named.thinking) == ("qwen3-4b", "Qwen/Qwen3-4B", True)
    (tmp_path / "folder").mkdir()
    local = choose.target_config(str(tmp_path / "folder"), [], "float32", False)
    assert (local.name, local.path, local.dtype) == ("folder", str(tmp_path / "folder"), "float32")
    hub = choose.target_config("org/Model-Instruct", [], "auto", False)
    assert (hub.name, hub.path) == ("model", "org/Model-Instruct"), "the name of its run folder"
    own = {"deepspec": {"target": {"name": "qwen3-4b"}}}
    drafters = choose.candidates([str(checkpoint(tmp_path / "x", **own))])
    assert choose.target_config(None, drafters, "auto", False).path == "Qwen/Qwen3-4B"


def record(place, name, path=None, provenance=None, revision=None):
    target = {"name": name} if path is None else {"name": name, "path": path, "revision": revision}
    return choose.candidates([str(checkpoint(place, deepspec={"target": target, "provenance": provenance or {}}))])


def test_a_recorded_path_is_used_where_it_still_leads_to_a_target(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DEEPSPEC_TARGETS", str(tmp_path / "local"))
    here = tmp_path / "models"
    here.mkdir()
    found = choose.target_config(None, record(tmp_path / "a", "mine", "org/model", revision="v1"), "float32", True)
    assert (found.name, found.path, found.revision, found.dtype) == ("mine", "org/model", "v1", "float32")
    assert found.thinking
    folder = record(tmp_path / "b", "gemma4-12b", str(here))
    found = choose.target_config(None, folder, "auto", False)
    assert (found.path, found.taps) == (str(here), [5, 17, 29, 41, 46])
    assert choose.target_config("gemma4-12b", folder, "auto", False).path == "google/gemma-4-12B-it"
    assert choose.target_config(None, record(tmp_path / "c", "mine", "models"), "auto", False).path == "models"
    gone = record(tmp_path / "d", "qwen3-4b", "/nowhere/at/all")
    assert choose.target_config(None, gone, "auto", False).path == "Qwen/Qwen3-4B"
    lost = record(tmp_path / "e", "mine", "../elsewhere")
    with pytest.raises(choose.ChooseError, match=r"target mine in ../elsewhere, which is not here: pass --target"):
        choose.target_config(None, lost, "auto", False)
    (tmp_path / "local" / "mine").mkdir(parents=True)
    assert choose.target_config(None, lost, "auto", False).name == "mine", "$DEEPSPEC_TARGETS/mine stands for it"


def test_older_checkpoints_name_the_path_in_their_recipe(tmp_path):
    recipe = {"recipe": {"target": {"name": "mine", "path": "org/model", "revision": None}}}
    old = record(tmp_path / "a", "mine", provenance=recipe)
    assert choose.target_config(None, old, "auto", False).path == "org/model"
    other = record(tmp_path / "b", "qwen3-4b", provenance=recipe)
    assert choose.target_config(None, other, "auto", False).path == "Qwen/Qwen3-4B", "another target's recipe"


def test_every_target_recipe_is_understood():
    for name in recipes.names("target"):
        if name != "custom":
            assert choose.target_config(name, [], "auto", False).name == name


def test_without_a_record_a_target_must_be_named(tmp_path):
    drafters = choose.candidates([str(checkpoint(tmp_path / "x"))])
    with pytest.raises(choose.ChooseError, match="records no target: pass --target"):
        choose.target_config(None, drafters, "auto", False)
