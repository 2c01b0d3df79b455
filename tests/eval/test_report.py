"""The report is one self-contained, well-formed page with every section, and a browser opens it."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from deepspec.eval import report
from deepspec.eval.summary import upgraded
from deepspec.train.config import TrackingConfig
from deepspec.train.tracking import Tracker
from tests.eval import made_up

SECTIONS = (
    "results",
    "comparison",
    "lossless",
    "positions",
    "lengths",
    "blocks",
    "time",
    "confidence",
    "training",
    "provenance",
)
VOID = {"meta", "br", "hr", "img", "input", "link"}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Checker(HTMLParser):
    """Collects ids, references and unbalanced tags."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.links, self.faults, self.figures = [], [], [], [], 0

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.figures += tag == "svg"
        if "id" in values:
            self.ids.append(values["id"])
        self.links += [values[name] for name in ("href", "src", "xlink:href", "data") if values.get(name)]
        if tag in ("script", "iframe", "object", "link", "img"):
            self.faults.append(f"<{tag}>")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}>")


def checked(html: str) -> Checker:
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert not checker.faults
    assert not checker.open
    return checker


def track(folder, steps):
    """The metrics.jsonl of a training run of ``steps`` steps, with the tracker's own lines; a kill cut the last one."""
    tracker = Tracker(TrackingConfig(wandb="disabled"), folder, name="dspark", config={})
    for step in range(2, steps + 1, 2):
        tracker.log(step, "train", {"loss": 3 - 0.01 * step, "tau": 1 + 0.01 * step, "skipped": 0})
        if step % 50 == 0:
            tracker.log(step, "eval", {"loss": 2.0, "tau": 1.5, "acceptance": [0.5, 0.25]})
    tracker.log(steps, "decode", {"tau": 1.4, "expected_tau": 1.5, "agrees": True})
    tracker.close()
    with tracker.path.open("a") as stream:
        stream.write('{"step": 1')


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    out = made_up.results(["gsm8k", "mbpp", "alpaca"], {"dspark": 1.0, "dflash": 0.9}, count=5)
    for item in out["variants"]:
        if item["drafter"]:
            place = folder / item["label"]
            (place / "best").mkdir(parents=True, exist_ok=True)
            track(place, steps=100)
            item["drafter"] = {**item["drafter"], "folder": str(place / "best")}
    return out


@pytest.fixture(scope="module")
def html(results):
    return report.build(results)


def test_every_section_is_there_and_the_tags_balance(html):
    checker = checked(html)
    assert [name for name in checker.ids if name in SECTIONS] == list(SECTIONS)
    assert checker.figures == 8
    assert len(checker.ids) == len(set(checker.ids)), "ids of two figures collide"


def test_nothing_is_loaded_from_elsewhere(html):
    assert all(link.startswith("#") for link in checked(html).links)
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//|@import|url\((?!["']?#)""", html)


def test_figures_and_claims_are_in_the_text(html, results):
    best = next(item for item in results["variants"] if item["headline"] and item["label"] == "dspark")
    assert f"<b>{best['macro']['tau']['value']:.2f}</b>" in html
    assert "14 of 15" in html
    assert "tie in mbpp/3 at token 17, logit gap 4.00e-04" in html
    assert results["target"]["fingerprint"] in html
    assert "ECE" in html


def test_training_and_held_out_curves_are_drawn(html, results):
    training = html.split('id="training"')[1]
    for title in ("training loss", "expected τ, training batches", "expected τ, held-out"):
        assert title in training
    assert "decoded τ" not in training, "a single point is no curve"


def test_a_run_of_one_logged_step_has_no_curve(tmp_path):
    short = made_up.results(["gsm8k"], {"dflash": 1.0}, count=2, sweep=False)
    track(tmp_path, steps=2)
    for item in short["variants"]:
        if item["drafter"]:
            item["drafter"] = {**item["drafter"], "folder": str(tmp_path)}
    assert "hold single points, no curve" in report.build(short)


def test_the_page_is_deterministic(html, results):
    assert report.build(results) == html


def test_missing_parts_say_so():
    small = made_up.results(["gsm8k"], {"dflash": 1.0}, count=2, sweep=False)
    for item in small["variants"]:
        for data in item["datasets"].values():
            data.pop("identity", None)
    small["warnings"] = ["drafter <b> was trained on thinking answers"]
    html = report.build(small)
    checked(html)
    for text in ("No variant recorded confidences", "--sweep-blocks measures", "One drafter was evaluated"):
        assert text in html
    assert "No metrics.jsonl" in html
    assert "identity check needs temperature 0" in html
    assert "drafter &lt;b&gt; was trained" in html


def test_the_command_rebuilds_the_page(tmp_path, results, capsys):
    (tmp_path / "results.json").write_text(json.dumps(results))
    assert report.main(["--results", str(tmp_path)]) == 0
    assert (tmp_path / "index.html").is_file()
    assert report.main(["--results", str(tmp_path / "results.json"), "--output", str(tmp_path / "other")]) == 0
    assert (tmp_path / "other" / "index.html").read_text() == (tmp_path / "index.html").read_text()
    assert str(tmp_path) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no results.json"),
        ("{}", "not a results file"),
        ('{"format": "deepspec-eval", "version": 99}', "schema version 99"),
        ("{", "not valid JSON"),
    ],
)
def test_results_that_cannot_be_read_are_one_line(tmp_path, capsys, content, message):
    if content is not None:
        (tmp_path / "results.json").write_text(content)
    assert report.main(["--results", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_browser_draws_it(tmp_path, html):
    """Chromium lays the page out without an error, wide enough that no table is cut, and the picture is not blank."""
    (tmp_path / "index.html").write_text(html, encoding="utf-8")
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    subprocess.run(
        [
            CHROMIUM,
            *flags.split(),
            "--disable-component-update",
            "--disable-sync",
            "--hide-scrollbars",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--window-size=1180,3000",
            f"--screenshot={tmp_path / 'page.png'}",
            (tmp_path / "index.html").as_uri(),
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )
    import matplotlib.image

    pixels = matplotlib.image.imread(tmp_path / "page.png")
    assert pixels.shape[:2] == (3000, 1180)
    assert pixels[..., :3].std() > 0.03, "the page is blank"
    assert (pixels[:, -20:, :3] > 0.99).all(), "something reaches over the right margin"


def test_results_of_version_1_are_read_in_todays_terms():
    """Old figures keep what they measured under names that say so; averages become means over data sets."""
    old = made_up.results(["gsm8k", "mbpp"], {"dspark": 1.0}, count=4, sweep=False)
    item = next(each for each in old["variants"] if each["label"] == "dspark")
    for average in (item["macro"], *item["domains"].values()):
        pooled = average.pop("pooled")
        average |= {name: pooled[name] for name in ("rounds", "conditional_acceptance", "survival", "accepted_lengths")}
        average["reliability"] = {
            "count": [0, 3],
            "confidence": [0.0, 0.8],
            "accepted": [0.0, 0.5],
            "ece": 0.3,
            "auc": 0.6,
            "positions": 3,
        }
        sweep = {"threshold": 0.5, "acceptance_rate": 0.7, "tau": 2.0, "proposal_length": 1.5}
        average["threshold_sweep"] = [sweep]
    for data in item["datasets"].values():
        data["acceptance_rate"] = data.pop("draft_acceptance_rate")
    upgraded(old)
    first, second = (item["datasets"][name]["conditional_acceptance"]["value"][0] for name in ("gsm8k", "mbpp"))
    assert item["macro"]["conditional_acceptance"]["value"][0] == pytest.approx((first + second) / 2, abs=1e-6)
    pooled = item["macro"]["pooled"]
    assert pooled["reliability"]["ece_2_conditional"] == 0.3
    assert pooled["threshold_sweep"][0]["on"] == "survival"
    assert pooled["threshold_sweep"][0]["draft_acceptance_rate"] == 0.7
    assert "draft_acceptance_rate" in item["datasets"]["gsm8k"]
    assert "ECE of c_k" in report.build(old)
