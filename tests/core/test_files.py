"""Files are written whole or not at all, and numbers that JSON does not have become None."""

import json
import math
import os

import pytest

from dpngd.files import finite_or_none, write_atomically


@pytest.mark.parametrize(("old", "new"), [("alt", "neu: λ_safe ε\n"), (b"\x00old", b"\x89PNG\r\n\x00new")])
def test_text_and_bytes_are_written_as_they_are(tmp_path, old, new):
    path = tmp_path / "folder" / "file"
    write_atomically(path, old)
    write_atomically(path, new)
    assert path.read_bytes() == (new.encode() if isinstance(new, str) else new)
    assert os.listdir(path.parent) == ["file"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_whoever_is_reading_the_old_file_reads_all_of_it(tmp_path):
    path = tmp_path / "a.json"
    write_atomically(path, "old")
    with path.open() as reader:
        write_atomically(path, "new and longer")
        assert reader.read() == "old"
    assert path.read_text() == "new and longer"


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    monkeypatch.setattr(os, "replace", lambda *a: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None])
def test_what_json_does_not_have_is_none(value):
    assert finite_or_none(value) is None


@pytest.mark.parametrize("value", [0.0, -1.5, 3, 1e308])
def test_other_numbers_stay(value):
    assert finite_or_none(value) is value
    assert json.loads(json.dumps(finite_or_none(value), allow_nan=False)) == value
