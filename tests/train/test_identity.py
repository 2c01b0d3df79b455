"""Identity of a run: what is not listed as free to change is compared, by name."""

import dataclasses

import pytest

from deepspec import recipes
from deepspec.files import write_json
from deepspec.train.checkpoint import Progress, ResumeError
from deepspec.train.config import TrainConfig
from deepspec.train.identity import MAY_CHANGE, check_identity, run_identity


class Samples:
    """A loader as far as identities ask it."""

    def __init__(self, contents: str = "bf16 abc") -> None:
        self.training_rows = [0, 1, 2]
        self.source = self
        self._contents = contents

    def digest(self) -> str:
        return "ids and lengths"

    def contents(self) -> str:
        return self._contents


class Saved:
    """A training state as far as identities ask it."""

    def __init__(self, identity) -> None:
        self.progress = Progress(identity=identity)


def configuration(*overrides: str) -> TrainConfig:
    return recipes.load("train", ["+recipe=dspark", "target=tiny-qwen3", *overrides], TrainConfig)


def facts(*overrides: str, contents: str = "bf16 abc", fingerprint: str = "weights"):
    return run_identity(configuration(*overrides), (1, 2), Samples(contents), fingerprint)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("loss.tv=0.5", "loss.tv"),
        ("loss.gamma_decay=2", "loss.gamma_decay"),
        ("optim.beta2=0.95", "optim.beta2"),
        ("optim.schedule=wsd", "optim.schedule"),
        ("train.seed=3", "train.seed"),
        ("data.heldout_max=3", "data.heldout_max"),
        ("data.anchors=3", "data.anchors"),
        ("drafter.layers=2", "drafter.layers"),
        ("target.thinking=true", "target.thinking"),
    ],
)
def test_what_changes_the_run_is_refused_by_name(override, named):
    with pytest.raises(ResumeError, match=rf"{named} was .* is "):
        check_identity(Saved(facts()), facts(override), "runs/x")


@pytest.mark.parametrize(
    "override",
    [
        "train.steps=50",
        "train.lr=1e-3",
        "train.eval_every=7",
        "data.path=elsewhere",
        "engine.zero=2",
        "tracking=none",
        "optim.ema=0.9",
    ],
)
def test_what_is_listed_may_change(override):
    assert check_identity(Saved(facts()), facts(override), "runs/x") == []


def test_other_states_of_the_same_conversations_are_refused():
    with pytest.raises(ResumeError, match="contents of the samples was 'bf16 abc', is 'int8 abd'"):
        check_identity(Saved(facts()), facts(contents="int8 abd"), "runs/x")
    with pytest.raises(ResumeError, match="target fingerprint was 'weights', is 'other'"):
        check_identity(Saved(facts()), facts(fingerprint="other"), "runs/x")


def test_runs_of_earlier_versions_go_on_and_say_what_was_not_compared():
    recorded = ("drafter.kind", "drafter.layers", "data.seed", "training samples", "digest of the samples")
    before = {name: value for name, value in facts().items() if name in recorded}
    unknown = check_identity(Saved(before), facts(), "runs/x")
    assert "loss.tv" in unknown
    assert "contents of the samples" in unknown
    assert "drafter.layers" not in unknown


def test_options_that_an_earlier_version_did_not_compare_are_read_from_the_drafter(tmp_path):
    """Its identity had no optimizer; the drafter it saved has the whole recipe."""
    recipe = {"loss": {"gamma_decay": 4.0}, "optim": {"beta2": 0.95, "ema": 0.9}}
    write_json(tmp_path / "last" / "config.json", {"deepspec": {"provenance": {"recipe": recipe}}})
    with pytest.raises(ResumeError, match=r"optim\.beta2 was 0\.95, is 0\.999"):
        check_identity(Saved({"drafter.kind": "dspark"}), facts(), str(tmp_path))
    unknown = check_identity(Saved({"drafter.kind": "dspark"}), facts("optim.beta2=0.95"), str(tmp_path))
    assert "optim.beta2" not in unknown
    assert "train.seed" in unknown


def test_an_eagle3_run_with_the_old_normaliser_is_not_continued():
    before = {"drafter.kind": "eagle3"}
    with pytest.raises(ResumeError, match=r"per sequence.*train\.init_from=runs/x"):
        check_identity(Saved(before), facts(), "runs/x")


def test_the_list_names_real_options():
    cfg = configuration()
    for group, (names, reason) in MAY_CHANGE.items():
        options = {field.name for field in dataclasses.fields(getattr(cfg, group))}
        assert names == ("*",) or set(names) <= options
        assert reason
