"""Identity of decoded answers: what names them, and which of earlier versions are left alone."""

from types import SimpleNamespace

import pytest
import torch

from deepspec.eval.records import Record, Recorder
from deepspec.eval.run import Ask, RunConfig, Session
from deepspec.eval.summary import Variant
from deepspec.models.sampling import Sampling

VARIANT = Variant("dspark", "dspark", 7, 4, drafter={"fingerprint": "weights", "confidence": True})
ASK = Ask("gsm8k", "p1", 0, (1, 2, 3), ())


def session(output, **changes) -> Session:
    target = SimpleNamespace(fingerprint="target", dtype=torch.float32, device=torch.device("cpu"))
    options = {"sampling": Sampling(), "max_new_tokens": 16, "thinking": False, "seed": 1, **changes}
    return Session(target, RunConfig(**options), output, quiet=True)


def answer() -> Record:
    return Record("gsm8k", "p1", 0, ASK.digest, 3, [5, 6], "length", [(7, 1, 2)], None, 1.0, 0.1, 0.2, 0.6, 0.1)


def write(output, key: str, revision: str | None) -> None:
    recorder = Recorder(output / f"records-{VARIANT.id}-rank0.jsonl", key, revision)
    recorder.add(answer())
    recorder.close()


def test_an_answer_is_reused_with_the_revision_that_decoded_it(tmp_path):
    run = session(tmp_path)
    write(tmp_path, run.settings(VARIANT), "c0ffee")
    (record,) = run.existing(VARIANT, {"gsm8k": [ASK]}).values()
    assert record.revision == "c0ffee"
    assert run.outdated(VARIANT) == 0


def test_answers_of_an_earlier_decoder_are_counted_but_not_reused(tmp_path):
    """Versions before the decoder had a version number wrote keys without one."""
    run = session(tmp_path)
    write(tmp_path, run.settings(VARIANT, semantics=None), None)
    assert run.existing(VARIANT, {"gsm8k": [ASK]}) == {}
    assert run.outdated(VARIANT) == 1
    later = run.settings(VARIANT, semantics=99)
    assert later not in (run.settings(VARIANT), run.settings(VARIANT, semantics=None))


@pytest.mark.parametrize(
    "change", [{"seed": 2}, {"max_new_tokens": 17}, {"thinking": True}, {"confidence_threshold": 0.5}]
)
def test_every_option_that_decides_an_answer_is_part_of_its_key(tmp_path, change):
    assert session(tmp_path, **change).settings(VARIANT) != session(tmp_path).settings(VARIANT)
