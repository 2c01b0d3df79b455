import json

import pytest

from deepspec.files import atomic_write, read_json, sha256_file, write_json


def test_an_error_while_writing_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def write_half():
        with atomic_write(path) as temporary:
            temporary.write_text("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_half()
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["a.txt"]


def test_json_round_trips_and_a_damaged_file_is_named(tmp_path):
    path = tmp_path / "new" / "a.json"
    write_json(path, {"τ": 2.5})
    assert read_json(path) == {"τ": 2.5} == json.loads(path.read_text())
    path.write_text("{")
    with pytest.raises(ValueError, match=r"a\.json is not valid JSON"):
        read_json(path)


def test_sha256_of_known_bytes(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert sha256_file(tmp_path / "a") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
