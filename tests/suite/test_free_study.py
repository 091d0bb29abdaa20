"""The study of the methods without a rate: its grid is the one that was written down, its arithmetic is right."""

import hashlib
import io
import json
import math
import tarfile

import numpy as np
import pytest

from dpngd import clamping, opacus, steps
from dpngd.errors import UsageError
from dpngd.methods import METHODS
from dpngd.suite import free_study as study
from dpngd.suite import paths, profiles

RUNS = [run for part in study.PARTS.values() for run in part]
MAPS = study.maps()


def test_no_run_is_asked_for_twice_and_all_are_on_validation_data_with_seeds_of_their_own():
    keys = [config.key() for _, _, config in (*RUNS, *MAPS)]
    assert len(keys) == len(set(keys))
    for _, _, c in (*RUNS, *MAPS):
        assert (c.validation, c.delta, c.evals) == (0.2, 1e-5, 4)
        assert 2000 <= c.seed < 3000
    for name in ("quick", "cpu", "paper"):
        assert not {c.seed for c in profiles.load(name).all_configs()} & {c.seed for _, _, c in RUNS}


def test_an_arm_differs_from_the_default_in_what_it_names():
    for cell, arm, c in RUNS:
        if c.method == "dp-sgd":
            continue
        found = {name: getattr(c, name) for name in study.DEFAULT}
        assert found == {**study.DEFAULT, **study.ARMS[arm]}, (cell, arm)
    for arm, changes in study.ARMS.items():
        assert all(study.DEFAULT[name] != value for name, value in changes.items()), arm


def test_the_arms_of_the_refresh_change_nothing_else_and_have_seeds_of_their_own():
    runs = study.after()["refresh"]
    assert len({c.key() for _, _, c in runs}) == len(runs) == 8 * 3 * 4
    assert not {c.seed for _, _, c in runs} & {c.seed for _, _, c in (*RUNS, *MAPS)}
    for cell, arm, c in runs:
        wanted = {**study.HELD_FIXED, **study.DEFAULT, **study.REFRESH[arm]}
        assert {name: getattr(c, name) for name in wanted} == wanted, (cell, arm)
        assert c.validation == 0.2


def test_shipping_keeps_what_another_machine_computed_and_replaces_what_was_computed_again():
    def row(part, seed, value):
        return {"part": part, "cell": "c", "arm": "a", "seed": seed, "accuracy": [value]}

    old = [row("few", 1, 10.0), row("mnist", 1, 20.0)]
    rows = study.merged(old, [row("many", 1, 30.0), row("few", 1, 11.0)], ["few", "many"])
    assert [(r["part"], r["accuracy"][0]) for r in rows] == [("few", 11.0), ("many", 30.0), ("mnist", 20.0)]


def test_the_maps_have_the_frozen_constants_and_are_all_there():
    assert {c.method for _, _, c in MAPS} == {m for m in METHODS if METHODS[m].kl_step} - {"dp-ngd-free"} | {"dp-sgd"}
    for _, arm, c in MAPS:
        if arm in METHODS:
            assert {n: getattr(c, n) for n in study.FROZEN if n in METHODS[arm].uses}.items() <= study.FROZEN.items()


def test_the_frozen_constants_are_those_of_every_default():
    """params/, `dpngd.steps`, `dpngd.clamping` and the Opacus optimizer."""
    frozen = study.FROZEN
    assert frozen == {"kl_budget": steps.K_DEFAULT, "kl_noise": steps.K_NOISE_DEFAULT, "probe": steps.PROBE,
                      "floor_rank": clamping.RANK_SHARE, "clip_ratio": opacus.CLIP_RATIO}
    for name in ("quick", "cpu", "paper"):
        profile = profiles.load(name)
        for method in (m for m in METHODS if METHODS[m].kl_step):
            for data, epsilons in profile.settings["artifacts"]["utility_table"]["cells"].items():
                c = profile.config(method, data, epsilons[0], 0)
                assert all(getattr(c, n) == v for n, v in frozen.items() if n in METHODS[method].uses)


def test_every_block_has_the_default_and_dp_sgd():
    blocks = {}
    for cell, arm, c in RUNS:
        blocks.setdefault((cell, c.seed), set()).add(arm)
    for (_, seed), arms in blocks.items():
        assert "default" in arms
        assert sum(arm.startswith("DP-SGD") for arm in arms) >= 2 or seed == 2002


def mnist_archive(path, images=3):
    """A package laid out as npm's, of a few images, and the sums of its files."""
    rng, sums = np.random.default_rng(0), {}
    with tarfile.open(path, "w:gz") as tar:
        for name in study.MNIST_MD5:
            body = rng.integers(0, 10, 784 * images if "images" in name else images, dtype=np.uint8).tobytes()
            content = bytes(16 if "images" in name else 8) + body
            info = tarfile.TarInfo(f"package/data/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
            sums[name] = hashlib.md5(content).hexdigest()
    return path, sums


def test_mnist_is_made_outside_the_project_and_only_if_it_is_mnist(tmp_path, monkeypatch):
    archive, sums = mnist_archive(tmp_path / "x.tgz")
    with pytest.raises(UsageError, match="is not MNIST's, its MD5 sum differs"):
        study.make_mnist(tmp_path / "out", archive)
    assert not list((tmp_path / "out").iterdir())
    monkeypatch.setattr(study, "MNIST_MD5", sums)
    made = np.load(study.make_mnist(tmp_path / "out", archive))
    assert {k: (v.shape, v.dtype) for k, v in made.items()} == {
        "x_train": ((3, 28, 28, 1), np.uint8), "y_train": ((3,), np.uint8),
        "x_test": ((3, 28, 28, 1), np.uint8), "y_test": ((3,), np.uint8)}
    with pytest.raises(UsageError, match="inside the project"):
        study.make_mnist(paths.ROOT / "data", archive)


def row(cell, arm, seed, accuracy, status="ok"):
    part = {"c": "maps", "d": "round-2"}.get(cell, "few")
    return {"part": part, "cell": cell, "arm": arm, "seed": seed, "accuracy": [1.0, accuracy], "status": status}


ROWS = [row("a", "default", 0, 50.0), row("a", "default", 1, 60.0), row("a", "x", 0, 53.0), row("a", "x", 1, 61.0),
        row("b", "default", 0, 40.0), row("b", "x", 0, 40.0),
        row("c", "x", 0, 99.0), row("c", "x", 1, 97.0), row("d", "default", 0, 30.0), row("d", "x", 0, 33.0),
        row("a", "DP-SGD 1", 0, 45.0), row("a", "DP-SGD 2", 0, 49.0), row("a", "DP-SGD 2", 1, 49.0)]


def test_differences_are_within_a_block_and_cells_weigh_the_same():
    few = [r for r in ROWS if r["part"] != "round-2"]
    assert study.arm_differences(few, "x") == {"a": 2.0, "b": 0.0}  # c has no default
    assert study.gain(few, "x") == (1.0, pytest.approx(math.sqrt(2) / math.sqrt(2)), 2)
    assert study.gain(ROWS, "nothing")[2] == 0
    assert study.best_sgd(ROWS, "a") == (49.0, "DP-SGD 2")
    assert "| x | +1.00 | 1.00 | +2.0 | +0.0 |" in study.tables(ROWS)
    assert "| x | +3.00 | inf | +3.0 |" in study.tables(ROWS)
    assert "| x | 98.0 | 1.4 | 2 |" in study.tables(ROWS)
    assert "| a | 55.0 | 49.0 (2) | +6.0 |" in study.tables(ROWS)


def test_a_run_that_diverged_counts_as_nothing_right():
    assert study.final(row("a", "x", 0, 53.0, "diverged")) == 0.0


def test_what_is_shipped_is_the_grid_and_its_table_is_in_the_docs():
    rows = study.shipped()
    assert rows
    asked = {(cell, arm, c.seed): c for cell, arm, c in (*RUNS, *MAPS, *study.after()["refresh"])}
    for r in rows:
        if not r["cell"].startswith("mnist"):  # its configs need the file
            assert r["config"] == asked[r["cell"], r["arm"], r["seed"]].canonical()
    text = (paths.ROOT / "docs" / "study.md").read_text(encoding="utf-8")
    for line in study.tables(rows).splitlines():
        assert line in text
    assert (paths.RESULTS / study.SHIPPED).stat().st_size < 500_000
    assert all(len(json.dumps(r)) < 1500 for r in rows)


def test_arms_on_the_cnn_are_compared_within_seeds(monkeypatch):
    made = {8: [90.0, 92.0], 16: [89.0, 92.0]}
    monkeypatch.setattr(study, "cnn_accuracy", lambda cell, seed, T_cur=8: made[T_cur][seed])
    table = study.cnn_table(study.DIGITS_28, {"a": {}, "b": {"T_cur": 16}}, range(2))
    assert table.splitlines()[2:] == ["| a | 91.0 |  | 91.0 |  |", "| b | 90.5 | -0.5 (0.5) | 90.5 | -0.5 (0.5) |"]
    assert "digits, T = 40, sigma = 1.6" in table


@pytest.mark.filterwarnings("ignore")
def test_a_run_of_the_cnn_is_a_function_of_its_arguments():
    cell = study.CNNCell("digits", 1150, 287, 256, 3, 1.6)
    first, again = (study.cnn_accuracy(cell, 1, T_cur=2, made=60) for _ in range(2))
    assert first == again
    assert 0 <= first <= 100
