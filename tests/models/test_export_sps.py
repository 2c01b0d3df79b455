"""The target's table of steps per second beside an export: copied as it is, refused where it is no such table."""

import json

import pytest

from deepspec.eval.sps import SPSProfile, SPSTable, load_profile
from deepspec.files import write_json
from deepspec.models import drafter as drafters
from deepspec.models.export import ExportError, export, imports, sps
from deepspec.models.export.__main__ import main
from tests.models.exporting import saved, write_target_gguf

TABLE = SPSTable((1, 8, 64), (100.0, 90.0, 40.0), context=256)


def profile(path, fingerprint=None):
    """A table as the profiler writes it."""
    details = {} if fingerprint is None else {"target": {"name": "tiny", "fingerprint": fingerprint}}
    SPSProfile((TABLE,), details).save(path)
    return path


def test_travels_with_every_export(tmp_path):
    saved(tmp_path / "drafter")
    write_target_gguf(tmp_path / "target.gguf")
    where = ["--drafter", str(tmp_path / "drafter"), "--all", "--no-include-head"]
    where += ["--target-gguf", str(tmp_path / "target.gguf")]
    assert main([*where, "--sps", str(profile(tmp_path / "sps.json"))]) == 0
    for engine in ("vllm", "sglang", "gguf", "deepspec"):
        copy = tmp_path / "drafter" / "export" / engine / sps.FILE
        assert copy.read_bytes() == (tmp_path / "sps.json").read_bytes()
        read = load_profile(copy).at(256)
        assert (read.tokens, read.steps_per_second) == (TABLE.tokens, TABLE.steps_per_second)


def test_of_another_target_is_refused(tmp_path):
    model, _ = saved(tmp_path / "drafter")
    drafters.save(model, tmp_path / "drafter", target_name="tiny", target_fingerprint="a" * 64)
    source = imports.read(tmp_path / "drafter")
    export(source, "vllm", tmp_path / "out", sps_table=profile(tmp_path / "sps.json", "a" * 64))
    with pytest.raises(ExportError, match=r"measured on tiny \(bbbbbbbbbbbb…\)"):
        export(source, "vllm", tmp_path / "no", sps_table=profile(tmp_path / "sps.json", "b" * 64))
    assert not (tmp_path / "no").exists()


ROW = {"tokens": 1, "steps_per_second": 10.0}
HEAD = {"kind": sps.KIND, "format_version": sps.VERSION}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([ROW], "needs"),
        ({"kind": sps.KIND, "format_version": 9, "rows": [ROW]}, "of version 1"),
        (HEAD, "no rows"),
        (HEAD | {"rows": []}, "no rows"),
        (HEAD | {"rows": [ROW, {"tokens": 2}]}, "row 2: .* has no tokens and steps_per_second"),
        (HEAD | {"rows": [ROW, 3]}, "row 2: 3 has no tokens"),
        (HEAD | {"rows": [ROW | {"tokens": 0}]}, "row 1: .* must have positive"),
        (HEAD | {"rows": [ROW | {"steps_per_second": -1.0}]}, "row 1: .* must have positive"),
        (HEAD | {"rows": [ROW, ROW]}, "row 2: .* each size once"),
    ],
)
def test_no_table_is_refused(content, message, tmp_path):
    _, source = saved(tmp_path / "drafter")
    write_json(tmp_path / "sps.json", content)
    with pytest.raises(ExportError, match=message):
        export(source, "vllm", tmp_path / "no", sps_table=tmp_path / "sps.json")
    assert not (tmp_path / "no").exists()


def test_command_names_the_remedy(tmp_path, capsys):
    saved(tmp_path / "drafter")
    where = ["--drafter", str(tmp_path / "drafter"), "--to", "vllm", "--sps"]
    assert main([*where, str(tmp_path / "none.json")]) == 2
    assert "deepspec.eval.profile --target" in capsys.readouterr().err
    (tmp_path / "sps.csv").write_text("tokens,steps_per_second\n1,10\n")
    assert main([*where, str(tmp_path / "sps.csv")]) == 2
    assert "--import" in capsys.readouterr().err
    (tmp_path / "sps.json").write_text(json.dumps(HEAD)[:-1])
    assert main([*where, str(tmp_path / "sps.json")]) == 2
    assert "not valid JSON" in capsys.readouterr().err
    assert main([*where, str(tmp_path / "sps.json"), "--check"]) == 2
