"""The result store: what is put is got, damage is noticed, exports are stable."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_runs import RECORD, config, fresh

from dpngd.errors import UsageError
from dpngd.suite.store import Damaged, Store, decode, encode, jsonable
from dpngd.suite.sweep import ensure


@pytest.fixture
def store(tmp_path):
    return Store("quick", root=tmp_path / "store", results=tmp_path / "results")


def test_what_is_put_is_got(store):
    assert store.get(config()) is None
    stored = store.put(config(), RECORD)
    assert stored == {**RECORD, "config": config().canonical(), "key": config().key()}
    assert store.get(config()) == stored
    assert store.get(config(seed=1)) is None
    assert Store("cpu", root=store.folder.parent).get(config()) is None


def test_numpy_numbers_and_non_finite_values_become_json(store):
    store.put(
        config(),
        {"status": "diverged", "loss": (np.float32(0.5), float("nan"), float("inf")), "n": np.int64(3)},
    )
    got = store.get(config())
    assert got["loss"] == [0.5, None, None]
    assert got["n"] == 3


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"accuracy": 1.0}, "status None: must be ok or diverged"),
        ({"status": "fine"}, "status 'fine'"),
        ({"status": "ok", "key": "0" * 16}, "config of another run"),
        ({"status": "ok", "x": {"y": [object()]}}, r"record\.x\.y\[0\] is a object"),
    ],
)
def test_a_bad_record_is_refused_and_nothing_is_written(store, record, message):
    with pytest.raises(UsageError, match=message):
        store.put(config(), record)
    assert not list(store.folder.glob("*"))


def test_a_bad_profile_name_is_refused():
    with pytest.raises(UsageError, match=r"profile '\.\./x'"):
        Store("../x")


def test_the_root_can_be_set_by_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("DPNGD_STORE", str(tmp_path / "elsewhere"))
    assert Store().folder == tmp_path / "elsewhere" / "common"


DAMAGE = {
    "cut short": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "a digit changed": lambda text: text.replace("0.875", "0.975"),
    "another run's": lambda text: encode({**json.loads(text), "key": config(seed=9).key()}),
    "not a record": lambda text: "[1, 2]",
    "binary": lambda text: "\x00\xff",
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_entry_is_named_missing_and_set_aside_when_recomputed(store, how, caplog):
    store.put(config(), RECORD)
    path = store.path(config().key())
    path.write_text(DAMAGE[how](path.read_text()))
    assert store.get(config()) is None
    assert path.name in store.damaged
    assert path.name in caplog.text
    damaged = path.read_bytes()
    store.put(config(), RECORD)
    assert store.get(config())["accuracy"] == RECORD["accuracy"]
    assert path.with_name(path.name + ".damaged").read_bytes() == damaged


def test_an_entry_with_the_right_key_and_another_config_is_not_used(store):
    store.put(config(), RECORD)
    path = store.path(config().key())
    record = json.loads(path.read_text())
    record["config"]["eta"] = 2.0
    path.write_text(encode(record))
    assert store.get(config()) is None
    assert "another run's" in store.damaged[path.name]


def test_a_good_entry_is_replaced_without_a_damaged_copy(store):
    store.put(config(), RECORD)
    store.put(config(), {**RECORD, "accuracy": [0.25]})
    assert store.get(config())["accuracy"] == [0.25]
    assert not list(store.folder.glob("*.damaged"))


def test_export_is_sorted_by_config_stable_and_read_first(store):
    for seed in (3, 0, 2, 1):
        store.put(config(seed), {**RECORD, "seconds": {"gradients": 10.0 - seed}})
    store.put(config(0, epsilon=1), RECORD)
    path = store.export()
    first = path.read_bytes()
    lines = [json.loads(line) for line in first.splitlines()]
    assert [(r["config"]["epsilon"], r["config"]["seed"]) for r in lines] == [
        (1, 0),
        (2, 0),
        (2, 1),
        (2, 2),
        (2, 3),
    ]
    assert store.export().read_bytes() == first

    # A timing that changes changes its own line and no other.
    store.put(config(2), {**RECORD, "seconds": {"gradients": 99.0}})
    changed = store.export().read_bytes().splitlines()
    assert [a == b for a, b in zip(first.splitlines(), changed, strict=True)] == [
        True,
        True,
        True,
        False,
        True,
    ]

    store.put(config(3), {**RECORD, "accuracy": [0.0]})
    assert fresh(store).get(config(3))["accuracy"] == RECORD["accuracy"]
    assert fresh(store, read_shipped=False).get(config(3))["accuracy"] == [0.0]
    assert store.clear([config(3).key(), "of no run"]) == 1
    assert store.clear() == 4
    assert len(list(store.folder.glob("*.json.before"))) == 5, "kept beside"
    assert fresh(store).get(config(3))["accuracy"] == RECORD["accuracy"]


def test_refreshing_ignores_the_shipped_records_but_never_drops_them(store, monkeypatch):
    store.put(config(0), RECORD)
    store.put(config(1), RECORD)
    store.export()
    store.clear()
    monkeypatch.setenv("DPNGD_REFRESH", "1")
    again = fresh(store)
    assert again.get(config(0)) is None
    again.put(config(0), {**RECORD, "accuracy": [1.0]})
    again.export()
    monkeypatch.delenv("DPNGD_REFRESH")
    assert fresh(store).get(config(0))["accuracy"] == [1.0]
    assert fresh(store).get(config(1))["accuracy"] == RECORD["accuracy"]


def test_odd_line_separators_in_a_text_do_not_break_the_lines_of_an_export(store):
    store.put(config(), {**RECORD, "note": "a\u2028b\nc\x85d"})
    store.export()
    store.clear()
    assert fresh(store).get(config())["note"] == "a\u2028b\nc\x85d"


def test_export_can_be_limited_to_some_runs(store):
    for seed in range(3):
        store.put(config(seed), RECORD)
    store.export(keys=[config(1).key()])
    assert [json.loads(line)["config"]["seed"] for line in store.shipped_path.read_text().splitlines()] == [1]


def test_a_damaged_shipped_line_is_named_and_the_others_are_used(store, caplog):
    for seed in range(3):
        store.put(config(seed), RECORD)
    store.export()
    store.clear()
    lines = store.shipped_path.read_text().splitlines()
    lines[1] = lines[1].replace("0.875", "0.975")
    store.shipped_path.write_text("\n".join(lines) + "\n")
    again = fresh(store)
    assert [again.get(config(seed)) is None for seed in range(3)] == [False, True, False]
    assert list(again.damaged) == ["quick.jsonl line 2"]
    assert "quick.jsonl line 2" in caplog.text
    for bad in (lines[1].encode().replace(b"0.975", b"0.9\xe9"), lines[1].encode().replace(b"0.975", b"NaN")):
        store.shipped_path.write_bytes(b"\n".join([lines[0].encode(), bad, lines[2].encode(), b""]))
        again = fresh(store)
        assert [again.get(config(seed)) is None for seed in range(3)] == [False, True, False]


NUMBERS = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(NUMBERS | st.sampled_from(["", "ε", "\u2028"]), lambda v: st.lists(v, max_size=3), max_leaves=8)


@given(st.dictionaries(st.sampled_from("abc"), VALUES))
def test_lines_come_back_as_they_were(values):
    record = jsonable({"key": "k", "config": {}, "status": "ok", **values}, "record")
    line = encode(record)
    assert decode(line) == record
    assert "\n" not in line
    with pytest.raises(Damaged):
        decode(line[:-1])


def test_a_store_that_is_a_file_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DPNGD_STORE", str(tmp_path / "file"))
    with pytest.raises(UsageError, match=r"^the store .* cannot be used: .*file is not a folder; set DPNGD_STORE to"):
        Store("quick")


def test_a_store_that_cannot_be_written_to_is_found_before_the_first_run(tmp_path, monkeypatch):
    def refuse(self, **options):
        raise PermissionError(13, "Permission denied")

    store = Store("quick", root=tmp_path / "store", results=tmp_path)
    monkeypatch.setattr(Path, "mkdir", refuse)  # a superuser may write wherever the mode says otherwise
    with pytest.raises(UsageError, match=r"^the store .* cannot be written to \(Permission denied\): set DPNGD_STORE"):
        ensure([config()], store=store, jobs=2, run=lambda c: pytest.fail("trained"))
