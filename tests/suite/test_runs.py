"""Records as accuracies: every run counts, once; contrasts pair seeds and cover the images that were kept."""

import numpy as np
import pytest
from claim_runs import config, product
from suite_records import packed, record, runs_of

from dpngd.errors import UsageError
from dpngd.suite import stats
from dpngd.suite.runs import Runs

A, B = {"method": "dp-ngd"}, {"method": "dp-sgd"}


def pair(seeds=range(4)):
    return product(("dp-ngd", "dp-sgd"), [("utkface", 2.0)], seeds=seeds)


def with_images(configs, right):
    """Runs whose images are `right(config)`, booleans."""
    return Runs.of(configs, [record(c, None, correct=right(c)) for c in configs])


def test_a_diverged_run_scores_chance():
    runs = runs_of(pair(), lambda c: None if (c.method, c.seed) == ("dp-ngd", 1) else 60.0 + c.seed)
    assert runs.by_seed(**A) == {0: 60.0, 1: 10.0, 2: 62.0, 3: 63.0}
    assert runs.mean(**A).n == 4
    assert runs.accuracies(**A) == [60.0, 10.0, 62.0, 63.0]
    assert runs.diverged(**A) == 1
    assert runs.contrast([(1, A), (-1, B)]).lost


def test_a_run_without_an_accuracy_scores_chance_too():
    runs = runs_of(pair(), lambda c: 60.0)
    runs.records[0]["accuracy"] = None
    assert runs.by_seed(**A)[0] == 10.0


def test_chance_is_that_of_the_data_set():
    runs = runs_of(pair(), lambda c: None)
    for r in runs.records:
        r["data"]["private"]["classes"] = 5
    assert set(runs.by_seed(**A).values()) == {20.0}


def test_a_seed_counts_once():
    runs = runs_of([*pair(), *(config("dp-ngd", seed=s, eta=3.0) for s in range(4))], lambda c: 60.0)
    with pytest.raises(UsageError, match=r"seed 0 is counted twice in method=dp-ngd \(dp-ngd, utkface, ε=2\)") as error:
        runs.by_seed(**A)
    assert "\n" not in str(error.value)
    assert len(runs.by_seed(**A, eta=3.0)) == 4


def test_only_seeds_that_every_cell_has_are_paired():
    runs = runs_of(pair(), lambda c: {("dp-ngd", 2): {}}.get((c.method, c.seed), 60.0 + c.seed) or {}["missing"])
    assert sorted(runs.contrast([(1, A), (-1, B)]).by_seed) == [0, 1, 3]
    assert runs.lead(A, {"method": "gep"}).n == 0
    assert runs.contrast([]).by_seed == {}


def test_a_contrast_is_that_of_its_bits():
    rng = np.random.default_rng(0)
    table = {(c.method, c.seed): rng.random(50) < (0.7 if c.method == "dp-ngd" else 0.5) for c in pair()}
    runs = with_images(pair(), lambda c: table[c.method, c.seed])
    L_si = 100.0 * np.array([table["dp-ngd", s].astype(float) - table["dp-sgd", s] for s in range(4)])
    found = runs.contrast([(1, A), (-1, B)])
    assert list(found.by_seed.values()) == pytest.approx(list(L_si.mean(1)))
    assert found.images == 50
    assert found.image_part == pytest.approx(stats.image_part(L_si))
    e = found.estimate()
    s2, L_i = L_si.mean(1).var(ddof=1), L_si.mean(0)
    rest = L_si - L_si.mean(1, keepdims=True) - L_i + L_i.mean()
    variance = s2 / 4 + max(0.0, L_i.var(ddof=1) / 50 - (rest**2).sum() / (3 * 49) / (4 * 50))
    assert e.se == pytest.approx(variance**0.5)
    assert e.images == 50


def test_a_diverged_run_has_chance_on_every_image():
    rng = np.random.default_rng(1)
    table = {(c.method, c.seed): rng.random(40) < 0.6 for c in pair()}
    runs = with_images(pair(), lambda c: table[c.method, c.seed])
    lost = runs.where(**A, seed=2).records[0]
    lost |= {"status": "diverged", "accuracy": None}
    del lost["correct"]
    found = runs.contrast([(1, A), (-1, B)])
    assert found.images == 40
    assert found.by_seed[2] == pytest.approx(10.0 - 100 * table["dp-sgd", 2].mean())


@pytest.mark.parametrize("change", ["none kept", "other number", "validation"])
def test_other_images_mean_seeds_only(change):
    rng = np.random.default_rng(2)
    runs = with_images(pair(), lambda c: rng.random(40) < 0.6)
    assert runs.lead(A, B).images == 40
    for r in runs.where(**B).records:
        if change == "none kept":
            del r["correct"]
        elif change == "other number":
            r |= {"correct": packed([True, False]), "accuracy": 0.5}
        else:
            r["evaluated_on"] = "validation"
    e = runs.lead(A, B)
    assert (e.images, e.image_part, e.n) == (0, 0.0, 4)


def test_the_validation_part_of_each_seed_is_its_own():
    runs = with_images(pair(), lambda c: np.arange(40) < 20 + c.seed)
    for r in runs.records:
        r["evaluated_on"] = "validation"
    assert runs.mean(**A).images == 0


def test_a_record_whose_images_say_another_accuracy_is_refused():
    runs = with_images(pair(), lambda c: np.arange(40) < 20)
    runs.records[0]["accuracy"] = 0.55
    with pytest.raises(UsageError, match=r"its accuracy is 0\.55, its images say 0\.5: the record is damaged") as error:
        runs.mean(**A)
    assert "\n" not in str(error.value)


def test_a_seed_can_be_left_out():
    runs = runs_of(pair(), lambda c: 60.0 + c.seed)
    left = runs.without(1)
    assert sorted(left.by_seed(**A)) == [0, 2, 3]
    assert left.values("seed") == [0, 2, 3]
    assert not left.missing


def test_the_best_by_its_mean():
    runs = runs_of(pair(), lambda c: None if c.method == "dp-ngd" and c.seed else 60.0)
    assert runs.best([A, B]) == B, "a run that diverged counts"
    assert runs.best([{"method": "gep"}]) is None
