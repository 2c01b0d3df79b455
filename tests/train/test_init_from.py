"""Fine-tuning starts from a drafter of any layout; one that is not what the recipe trains is refused by name."""

import json

import pytest
import torch

from deepspec.models import drafter as drafters
from deepspec.models.export import checkpoint as folders
from deepspec.models.export import export, imports
from deepspec.train import engine, tracking
from deepspec.train.config import TrainConfigError
from deepspec.train.setup import prepare
from tests.models.drafting import shake
from tests.models.exporting import speculators, zlab
from tests.train import tiny_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_run.make(tmp_path_factory.mktemp("tiny"))


def start(cfg):
    device = torch.device("cpu")
    engine.start(cfg.engine, device)
    return prepare(cfg, device, torch.float32)


@pytest.fixture(scope="module")
def trained(folder):
    """Make a drafter with weights of its own for a recipe, and save it as training does: its checkpoint."""

    def make(recipe, **changes):
        place = folder / "-".join([recipe, *map(str, changes.values())])
        if not place.exists():
            made = shake(start(tiny_run.config(folder, recipe=recipe, **changes)).drafter)
            drafters.save(made, place, target_name="tiny-qwen3", dtype=torch.float32)
        return imports.read(place)

    return make


def published(source, place):
    """An EAGLE-3 file as others publish it: the layout of vLLM, without this project's facts."""
    export(source, "vllm", place)
    fields = json.loads((place / "config.json").read_text())
    del fields["deepspec"]
    (place / "config.json").write_text(json.dumps(fields))


LAYOUTS = {
    "speculators": ("dspark", {}, lambda source, place: folders.write(speculators(source), place)),
    "speculators reduced": (
        "dspark",
        {"drafter__draft_vocab_size": 40},
        lambda source, place: folders.write(speculators(source), place),
    ),
    "z-lab": ("dflash", {}, lambda source, place: folders.write(zlab(source, sample_from_anchor=True), place)),
    "EAGLE-3": ("eagle3", {"drafter__qk_norm": "false"}, published),
    "vllm, eagle3": ("eagle3", {"drafter__qk_norm": "false"}, lambda source, place: export(source, "vllm", place)),
    "vllm, dflash": ("dflash", {}, lambda source, place: export(source, "vllm", place)),
    "sglang": ("dspark", {}, lambda source, place: export(source, "sglang", place)),
    "deepspec": ("dspark-rnn", {"drafter__markov_rank": 8}, lambda source, place: export(source, "deepspec", place)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_where_a_run_can_start(layout, folder, trained, tmp_path):
    recipe, changes, write = LAYOUTS[layout]
    source = trained(recipe, **changes)
    write(source, tmp_path / "theirs")
    run = start(tiny_run.config(folder, recipe=recipe, train__init_from=tmp_path / "theirs", name="x", **changes))
    stored = {name: tensor for name, tensor in source.tensors.items() if name not in (folders.EMBED, folders.HEAD)}
    ours = {drafters.published_name(name): tensor for name, tensor in run.drafter.state_dict().items()}
    assert stored.keys() <= ours.keys()
    assert all(torch.equal(ours[name].float(), tensor.float()) for name, tensor in stored.items())
    assert run.drafter.training


def test_a_calibration_is_not_inherited(folder, trained, tmp_path):
    """It was fitted to confidences that training now changes."""
    folders.write(trained("dspark"), tmp_path / "calibrated")
    block = drafters.read_config(tmp_path / "calibrated")["block_size"]
    drafters.update_metadata(tmp_path / "calibrated", temperatures=[2.0] * block, calibration={"method": "sts"})
    cfg = tiny_run.config(folder, name="recalibrate", train__steps=1, train__init_from=tmp_path / "calibrated")
    tiny_run.trainer(cfg).fit()
    facts = drafters.read_config(f"{cfg.folder}/last")["deepspec"]
    assert facts["temperatures"] is None
    assert "calibration" not in facts


def test_a_speculators_drafter_is_fine_tuned_to_one_of_ours(folder, trained, tmp_path):
    source = trained("dspark")
    folders.write(speculators(source), tmp_path / "theirs")
    losses = []
    for name, place in (("ours", folder / "dspark"), ("theirs", tmp_path / "theirs")):
        cfg = tiny_run.config(folder, name=f"tuned-{name}", train__steps=3, train__init_from=place)
        tiny_run.trainer(cfg).fit()
        losses.append([record["loss"] for record in tracking.read(cfg.folder) if record["kind"] == "train"])
    assert losses[0] == losses[1]
    made = imports.read(f"{cfg.folder}/last")
    assert made.metadata["target"]["name"] == "tiny-qwen3"
    assert made.tensors.keys() == source.tensors.keys()
    rounded = {name: tensor.bfloat16().float() for name, tensor in source.tensors.items()}
    moved = [float((made.tensors[name].float() - before).abs().max()) for name, before in rounded.items()]
    assert 0 < min(moved) < max(moved) < 0.1


def test_what_differs_from_the_recipe_is_named(folder, trained, tmp_path):
    folders.write(speculators(trained("dspark")), tmp_path / "dspark")
    with pytest.raises(TrainConfigError, match=r"drafter\.kind=dflash \(there dspark\).*rank=0 \(there 8\)"):
        start(tiny_run.config(folder, recipe="dflash", train__init_from=tmp_path / "dspark"))
    moved = speculators(trained("dspark"), aux_hidden_state_layer_ids=[1, 2, 4])
    folders.write(moved, tmp_path / "moved")
    with pytest.raises(TrainConfigError, match=r"reads taps \[0, 1, 3\], the data holds \[0, 1, 2\]"):
        start(tiny_run.config(folder, train__init_from=tmp_path / "moved"))
    eagle3 = trained("eagle3", drafter__qk_norm="false")
    published(eagle3.replaced(target_layer_ids=[-1, 0, 2]), tmp_path / "eagle3")
    with pytest.raises(drafters.CheckpointError, match=r"mean the taps \[0, 1, 3\] or \[-1, 0, 2\], not \[0, 1, 2\]"):
        start(tiny_run.config(folder, recipe="eagle3", drafter__qk_norm="false", train__init_from=tmp_path / "eagle3"))
    with pytest.raises(drafters.CheckpointError, match="does not exist"):
        start(tiny_run.config(folder, train__init_from=tmp_path / "nowhere"))
    with pytest.raises(drafters.CheckpointError, match="no drafter layout that is known"):
        start(tiny_run.config(folder, train__init_from=folder / "target"))
