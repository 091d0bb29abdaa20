"""The gate and the grid search: who wins, what is written, that the other runs use it and keep the equation."""

import collections
import functools
import itertools
import math
import random

import pytest
from suite_records import record

from dpngd.errors import UsageError
from dpngd.methods import METHODS
from dpngd.suite import command, params, paths, profiles, run, tables, tuning
from dpngd.suite.profiles import load, profile_names
from dpngd.suite.runs import Runs
from dpngd.suite.store import Store
from dpngd.suite.tuning import Candidate, best, choose, second_round, stable

MINE = """
methods: {dp-sgd: {T: 8}, gep: {T: 8}, dp-ngd: {T: 8, eta: null, lambda_safe: 0.04}}
tuning:
  cells: {cifar10: [1, 8]}
  seeds: [77]
  second: 4
  finalists: {best: 2, per_T: 1, seeds: [78, 79]}
  curve: {cifar10: {1: [32]}}
  arms: {dp-ngd-pre: [cifar10]}
  grid:
    dp-sgd: {eta: [0.5, 1.0, 2.0], T: [8, 16]}
    gep: {rate: [0.5, 1.0, 2.0], C0+C1: [[1.0, 1.0], [4.0, 1.0]]}
    dp-ngd: {lambda_safe: [0.01, 0.04, 0.16], lambda_base_ratio: [0.25, 1.0]}
    dp-ngd-pre: {rate: [0.5, 1.0]}
tuning_networks: {grid: {}, cells: {}}
"""
SIMPLE = MINE.replace("second: 4", "second: 0").replace("{best: 2, per_T: 1, seeds: [78, 79]}",
                                                        "{best: 1, per_T: 1, seeds: []}")
TWO_NETWORKS = SIMPLE.replace("tuning_networks: {grid: {}, cells: {}}", """tuning_networks:
  cells: {cifar10: [2]}
  seeds: [77]
  finalists: {best: 1, per_T: 1, seeds: []}
  grid: {dp-sgd: {eta: [4.0, 16.0], T: [8]}, dp-ngd: {lambda_safe: [0.01, 1.0], T: [8]}}
""")


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A profile `mine` of its own folder, and its store."""
    (tmp_path / "paper.yaml").write_text((paths.PARAMS / "paper.yaml").read_text())
    (tmp_path / "mine.yaml").write_text(MINE)
    monkeypatch.setattr(paths, "PARAMS", tmp_path)
    return Store("mine", root=tmp_path / "store", results=tmp_path / "results")


def state(text):
    (paths.PARAMS / "mine.yaml").write_text(text)


def search(store, monkeypatch, accuracy, losses=lambda c: None):
    """`dpngd tune mine` with made-up records; the number of runs of each round."""
    rounds = []

    def ensure(configs, store, jobs, seconds):
        rounds.append(len(configs))
        for c in configs:
            value = accuracy(c)
            store.put(c, record(c, value, losses=losses(c), status="ok" if value is not None else "diverged"))

    monkeypatch.setattr(tuning.sweep, "ensure", ensure)
    tuning.search("mine", store, 1)
    return rounds


def near(c, eta, at=0.5):
    """An accuracy with its peak at one rate, on a log scale."""
    return at - 0.05 * abs(math.log2(c.eta / eta))


# ---- The choice ------------------------------------------------------------------------------------------------------

def candidate(eta, *accuracies, losses=None, T=20):
    c = load("quick").config("dp-sgd", "digits", 4, 0, T=T, eta=eta)
    return Candidate({"eta": eta}, c, [record(c, a, losses=losses, status="ok" if a is not None else "diverged")
                                       for a in accuracies])


def test_the_smallest_rate_within_one_standard_error_of_the_best_is_chosen():
    # variances 1e-4, so that a mean of 3 seeds has a standard error of 0.00577
    rows = [candidate(eta, m - 0.01, m, m + 0.01) for eta, m in ((1.0, 0.490), (2.0, 0.495), (4.0, 0.500))]
    assert choose(rows).axes == {"eta": 2.0}
    assert choose(rows[:1] + rows[2:]).axes == {"eta": 4.0}, "1.0 is one point below"
    assert choose([candidate(eta, m, m, m) for eta, m in ((1.0, 0.49), (4.0, 0.50))]).axes == {"eta": 4.0}, "no width"
    assert choose([candidate(4.0, 0.5), candidate(2.0, 0.5), candidate(8.0, 0.5)]).axes == {"eta": 2.0}, "a tie"


def test_what_is_unstable_in_some_seed_does_not_win():
    calm, wild = [2.0] * 20, [2.0] * 10 + [3.1] + [2.0] * 9
    early = [2.0, 9.0, *[2.0] * 18]
    assert [stable({"status": "ok", "train_loss": x}) for x in (calm, wild, early)] == [True, False, True]
    assert stable({"status": "ok", "train_loss": [2.0, None, 3.0]})
    assert not stable({"status": "diverged", "train_loss": calm})
    ahead = candidate(4.0, 0.6, 0.6)
    loud = Candidate(ahead.axes, ahead.config, [*ahead.records[:1], record(ahead.config, 0.6, losses=wild)])
    assert choose([loud, candidate(8.0, 0.4, 0.4)]).axes == {"eta": 8.0}
    assert choose([loud]).axes == {"eta": 4.0}, "where nothing is stable, something has to win"
    assert choose([candidate(4.0, 0.9, None), candidate(8.0, 0.4, 0.4)]).axes == {"eta": 8.0}, "a diverged seed"


def test_finalists_are_the_best_and_stable_ones_first():
    rows = [candidate(1.0, 0.5), candidate(2.0, 0.6, losses=[1.0] * 10 + [9.0] * 10), candidate(4.0, 0.5),
            candidate(8.0, None)]
    assert [c.axes["eta"] for c in best(rows, 3)] == [1.0, 4.0, 2.0]


# ---- The second round ------------------------------------------------------------------------------------------------

def test_beyond_an_edge_and_around_an_inner_best():
    grid = {"rate": [0.5, 1.0, 2.0], "pt_steps": [30, 300], "T": [8, 16]}
    beyond = second_round(grid, {"rate": 2.0, "pt_steps": 300, "T": 8}, 6, ["T"])
    assert [(a["rate"], a["pt_steps"]) for a in beyond] == [
        (4.0, 300), (2.0, 3000), (8.0, 300), (2.0, 30000), (4.0, 3000), (4.0, 30000)]
    assert {a["T"] for a in beyond} == {8}
    inner = second_round(grid, {"rate": 1.0, "pt_steps": 30, "T": 8}, 4, ["T"])
    assert [(a["rate"], a["pt_steps"]) for a in inner] == [(1.41, 30), (1.0, 3), (0.707, 30), (1.0, 1)]
    assert second_round(grid, {"rate": 1.0, "pt_steps": 30, "T": 8}, 0, ["T"]) == []


def test_joint_axes_and_blocks_have_moves_too():
    joint = second_round({"C0+C1": [[1.0, 1.0], [0.25, 1.0]]}, {"C0": 0.25, "C1": 1.0}, 6, [])
    assert joint == [{"C0": 0.0625, "C1": 1.0}, {"C0": 0.0156, "C1": 1.0}]
    grid = [{"lambda_safe": [0.25, 1.0, 4.0, 16.0], "lambda_base_ratio": [0.25]},
            {"lambda_safe": [1.0, 4.0], "lambda_base_ratio": [0.0625]}]
    found = second_round(grid, {"lambda_safe": 16.0, "lambda_base_ratio": 0.25}, 6, [])
    assert found[:2] == [{"lambda_safe": 64.0, "lambda_base_ratio": 0.25},
                         {"lambda_safe": 16.0, "lambda_base_ratio": 1.0}]
    assert len(found) == 6
    assert all(f not in profiles.points(grid) for f in found)
    assert second_round({"rate": [1.0]}, {"rate": 1.0}, 6, []) == [], "one value has no steps"


def test_a_move_to_a_value_that_no_run_can_have_gives_way_to_a_shorter_one():
    """lambda_base above lambda_safe is refused: such a trial once would have ended a search of hours half way."""
    ratios = {"lambda_safe": [1.0, 4.0, 16.0], "lambda_base_ratio": [0.0625, 0.25]}
    found = second_round(ratios, {"lambda_safe": 4.0, "lambda_base_ratio": 0.25}, 6, [])
    assert len(found) == 6, "and there are as many trials as everywhere else"
    assert [a["lambda_base_ratio"] for a in found if a["lambda_safe"] == 4.0] == [1.0, 0.5]
    at_the_end = second_round({"lambda_base_ratio": [0.25, 1.0]}, {"lambda_base_ratio": 1.0}, 6, [])
    assert at_the_end == [{"lambda_base_ratio": 0.5}, {"lambda_base_ratio": 0.707}]
    assert second_round({"T1": [0.1, 0.4]}, {"T1": 0.4}, 6, []) == [{"T1": 0.8}, {"T1": 0.2}]


@pytest.mark.parametrize("luck", range(8))
def test_a_search_of_the_shipped_profile_ends_whatever_wins(luck):
    """Made-up accuracies, another winner each time: every trial that follows is a run that there can be, all methods
    have 24 trials at every cell, and DP-NGD's rate is the equation's in each of them."""
    asked = {}

    def made_up(c):
        asked[c.key()] = c
        return {"accuracy": random.Random(f"{luck} {c.key()}").random(), "status": "ok", "train_loss": [1.0] * c.T}

    found = tuning.search_plan("cpu", made_up)
    assert not found.missing
    assert {c.validation for c in asked.values()} == {0.1}
    assert {c.seed for c in asked.values()} == {1000, 1001, 1002}
    own = [c for c in asked.values() if c.model == "small" and c.seed == 1000 and c.T in (100, 200, 400)]
    trials = collections.Counter((c.method, c.data, c.epsilon) for c in own if not METHODS[c.method].arm_of)
    assert len(trials) == 5 * (3 * 2 + 2), "at epsilon 1 and 8 everywhere, and at 2 on two sets"
    assert set(trials.values()) == {24}
    for c in asked.values():
        if c.method == "dp-ngd":
            kept = c.model if c.model != "small" else "between" if c.epsilon == 2 else None
            eta_sgd = found.tuned["eta_sgd"][profiles.place(c.data, kept)]
            assert c.eta * c.C / c.lambda_safe**0.5 == pytest.approx(eta_sgd[c.epsilon][c.T], rel=1e-5)


def test_a_trial_of_the_grid_is_not_run_twice():
    grid = {"rate": [0.5, 1.0, 1.41, 2.0]}
    assert second_round(grid, {"rate": 1.41}, 6, []) == [{"rate": 1.68}, {"rate": 1.19}]


# ---- The whole search ------------------------------------------------------------------------------------------------

def test_rounds_follow_one_another_and_all_methods_have_as_many_trials(mine, monkeypatch):
    rounds = search(mine, monkeypatch, lambda c: near(c, 1.0))
    # DP-SGD: 6 trials at each epsilon and 3 at T = 32; then 2 at each T; then 2 seeds of one finalist at each T.
    # The others: 6 each; then 4 each; then 2 seeds of 2 finalists. The arm: 2; then 2 seeds of 2. At epsilon 1 and 8.
    assert rounds == [15, 10, 10, 24, 16, 16, 4, 8]
    profile = load("mine")
    for method, epsilon in itertools.product(("dp-sgd", "gep", "dp-ngd"), (1, 8)):
        own = [c for trials in (profile.trials, profile.second) for _, c in trials(method, "cifar10", epsilon)
               if c.T != 32]
        assert len(own) == len({c.key() for c in own}) == 10
    assert sum(rounds) == len(profile.configs("tuning")), "what the notebooks will ask for is what was run"
    assert not tuning.search_plan("mine", mine.get).missing


def test_later_trials_are_counted_before_they_are_known(mine, monkeypatch):
    before = load("mine")
    rounds = search(mine, monkeypatch, lambda c: near(c, 1.0))
    assert len(before.configs("tuning")) + before.later_trials() == sum(rounds)


def test_an_interrupted_search_goes_on_where_it_was(mine, monkeypatch):
    whole = search(mine, monkeypatch, lambda c: near(c, 1.0))
    files = {f.name: f.read_text() for f in (paths.PARAMS / "tuned").iterdir()}
    assert search(mine, monkeypatch, lambda c: pytest.fail("trained again")) == []
    assert {f.name: f.read_text() for f in (paths.PARAMS / "tuned").iterdir()} == files
    last = [c for c in load("mine").configs("tuning") if c.method == "dp-ngd-pre"]
    for c in last:
        mine.path(c.key()).unlink()
    assert search(mine, monkeypatch, lambda c: near(c, 1.0)) == whole[-2:]


def test_dp_sgds_rate_at_each_T_and_what_the_others_make_of_it(mine, monkeypatch):
    state(SIMPLE)
    peaks = {(1, 8): 2.0, (1, 16): 1.0, (1, 32): 0.5, (8, 8): 2.0, (8, 16): 2.0}

    def accuracy(c):
        if c.method == "dp-sgd":
            return near(c, peaks[c.epsilon, c.T], 0.4 + 0.1 * (c.T == 16))
        if c.method == "gep":
            return 0.3 + 0.1 * (c.C0 == 4.0)
        return 0.3 + c.lambda_safe - c.lambda_base if c.method == "dp-ngd" else 0.3

    search(mine, monkeypatch, accuracy)
    assert params.written("mine")["eta_sgd"] == {"cifar10": {1: {8: 2.0, 16: 1.0, 32: 0.5}, 8: {8: 2.0, 16: 2.0}}}
    profile = load("mine")
    sgd = profile.config("dp-sgd", "cifar10", 1, 0)
    assert (sgd.T, sgd.eta) == (16, 1.0)
    assert profile.config("dp-sgd", "cifar10", 4, 0).eta == 2.0, "4 is nearer to 8 on a log scale"
    assert profile.config("dp-sgd", "cifar10", 1, 0, T=32).eta == 0.5
    between = profile.config("dp-sgd", "cifar10", 1, 0, T=11)
    assert between.eta == pytest.approx(2.0 ** (1 - math.log2(11 / 8)), rel=1e-5)
    gep = profile.config("gep", "cifar10", 1, 0)
    assert (gep.T, gep.C0, gep.eta) == (8, 4.0, pytest.approx(0.5 * 2.0 / math.hypot(4, 1), rel=1e-5))
    ngd = profile.config("dp-ngd", "cifar10", 1, 0)
    assert (ngd.lambda_safe, ngd.lambda_base) == (0.16, pytest.approx(0.04))
    assert ngd.eta == pytest.approx(2.0 * math.sqrt(0.16) / 10, rel=1e-5), "eta_sgd C_sgd sqrt(lambda_safe) / C"
    longer = profile.config("dp-ngd", "cifar10", 1, 0, T=32)
    assert longer.eta == pytest.approx(ngd.eta * 0.5 / 2.0, rel=1e-5), "at a fixed T every rate moves with DP-SGD's"
    assert longer.lambda_safe == ngd.lambda_safe
    pre, equal = (profile.config("dp-ngd-pre", "cifar10", 1, 0, **f) for f in ({}, {"rate": 1.0}))
    assert (pre.lambda_safe, pre.eta) == (0.16, pytest.approx(0.5 * equal.eta, rel=1e-5))
    assert equal.eta * equal.C / equal.lambda_safe == pytest.approx(2.0, rel=1e-5), "at equal rate: the equation's"
    auto = profile.config("dp-ngd-auto", "cifar10", 1, 0)
    assert (auto.T, auto.eta_sgd, auto.C_sgd) == (16, 1.0, 1.0), "DP-SGD's T and rate, nothing of its own"
    assert profile.config("dp-sgd", "svhn", 4, 0).eta == 2.0, "as stated, where nothing was searched"


def test_a_setting_that_was_lucky_once_does_not_win(mine, monkeypatch):
    def accuracy(c):
        if c.method != "gep":
            return near(c, 1.0)
        return 0.3 + 0.3 * (c.C0 == 4.0 and c.seed == 77 and c.eta > 0.3) + 0.1 * (c.C0 == 1.0 and c.eta > 1)

    search(mine, monkeypatch, accuracy)
    later = params.written("mine", "-trials")
    assert later["finalists"]["gep"]["cifar10"][1][0]["C0"] == 4.0
    lucky = [c.seed for axes, cs in load("mine").repeats("gep", "cifar10", 1) for c in cs]
    assert sorted(set(lucky)) == [78, 79]


def test_another_network_is_searched_for_itself(mine, monkeypatch):
    state(TWO_NETWORKS)
    search(mine, monkeypatch, lambda c: 0.5 + c.eta / 100 if c.model == "resnet-20" else near(c, 1.0))
    after = load("mine")
    assert after.config("dp-sgd", "cifar10", 2, 0, model="resnet-20").eta == 16.0
    assert after.config("dp-sgd", "cifar10", 2, 0).eta == 1.0
    assert after.config("dp-sgd", "cifar10", 2, 0, model="small").eta == 1.0
    other = after.config("dp-ngd", "cifar10", 2, 0, model="resnet-20")
    assert (other.lambda_safe, other.eta) == (1.0, pytest.approx(1.6))


def test_a_data_set_is_written_when_all_of_it_is_chosen(mine, monkeypatch):
    assert not tuning.search_plan("mine", mine.get).done
    for c in load("mine").trials("dp-sgd", "cifar10", 1):
        mine.put(c[1], record(c[1], 0.5))
    found = tuning.search_plan("mine", mine.get)
    tuning.write_chosen("mine", found)
    assert not (paths.PARAMS / "tuned").exists()
    assert {(c.method, c.epsilon) for c in found.missing} == {("dp-sgd", 1), ("dp-sgd", 8)}


def test_a_damaged_trial_does_not_take_back_what_was_chosen(mine, monkeypatch):
    search(mine, monkeypatch, lambda c: near(c, 1.0))
    before = params.written("mine")
    assert before["eta_sgd"]
    first = load("mine").trials("dp-sgd", "cifar10", 1)[0][1]
    mine.path(first.key()).unlink()
    found = tuning.search_plan("mine", mine.get)
    assert not found.done
    tuning.write_chosen("mine", found)
    assert params.written("mine") == before


def test_only_and_gate_exclude_each_other(mine):
    for argv, says in ((["--gate", "--only", "tuning"], "the gate is no search"),
                       (["--only", "nonsense"], "unknown search")):
        with pytest.raises(UsageError, match=says):
            command.tune(["mine", *argv])


def test_another_networks_search_begins_when_the_first_is_complete(mine, monkeypatch):
    state(TWO_NETWORKS)
    assert {c.model for c in tuning.search_plan("mine", mine.get).missing} == {"wrn-16-4"}, "the profile's own"
    assert {c.model for c in tuning.search_plan("mine", mine.get, ["tuning_networks"]).missing} == {"resnet-20"}
    monkeypatch.setattr(tuning.sweep, "ensure", lambda configs, store, jobs, seconds: [
        store.put(c, record(c, near(c, 0.9))) for c in configs])
    found = tuning.search("mine", mine, 1, ["tuning"])
    assert not found.missing
    assert {c.model for c in tuning.search_plan("mine", mine.get).missing} == {"resnet-20"}


def test_a_network_that_waits_for_its_own_search_is_not_run(mine, monkeypatch):
    """Else it would be compared at settings that were chosen for another network."""
    state(TWO_NETWORKS + """
artifacts:
  networks: {methods: [dp-sgd, dp-ngd, dp-ngd-free], cells: {cifar10: [2]}, vary: {model: [wrn-16-4, resnet-20]},
             seeds: [5]}
""")

    def asked():
        return {(c.method, c.model) for c in load("mine").configs("networks")}

    every = set(itertools.product(("dp-sgd", "dp-ngd", "dp-ngd-free"), ("wrn-16-4", "resnet-20")))
    assert asked() == every, "nothing is tuned yet: counted as stated"
    monkeypatch.setattr(tuning.sweep, "ensure", lambda configs, store, jobs, seconds: [
        store.put(c, record(c, near(c, 0.9))) for c in configs])
    tuning.search("mine", mine, 1, ["tuning"])
    assert asked() == every - {("dp-sgd", "resnet-20"), ("dp-ngd", "resnet-20")}, "dp-ngd-free has no search"
    tuning.search("mine", mine, 1)
    assert asked() == every


BETWEEN = SIMPLE + """
tuning_between:
  cells: {cifar10: [2]}
  seeds: [77]
  second: 0
  finalists: {best: 1, per_T: 1, seeds: []}
  grid: {dp-sgd: {eta: [4.0, 16.0], T: [8]}, dp-ngd: {lambda_safe: [0.01, 1.0], T: [8]}}
artifacts:
  between: {methods: [dp-sgd, dp-ngd, dp-ngd-free], cells: {cifar10: [2]}, vary: {search: [tuning_between]}, seeds: [5]}
"""


def test_what_a_search_apart_chooses_is_for_the_artifact_that_asks_for_it(mine, monkeypatch):
    """At an epsilon between those of the first search: everything else keeps the settings of the nearer one."""
    state(BETWEEN)
    search_of = functools.partial(tuning.search, "mine", mine, 1)
    monkeypatch.setattr(tuning.sweep, "ensure", lambda configs, store, jobs, seconds: [
        store.put(c, record(c, near(c, 16.0 if c.epsilon == 2 else 0.9))) for c in configs])
    search_of(["tuning"])
    before = load("mine")
    assert not before.decided("tuning_between")
    assert "tuning_between" not in before.artifacts
    assert {c.method for c in before.configs("between")} == {"dp-ngd-free"}, "no run at settings that nobody has chosen"
    nearest = {m: before.config(m, "cifar10", 2, 5) for m in ("dp-sgd", "dp-ngd")}
    assert {c.epsilon for c in tuning.search_plan("mine", mine.get).missing} == {2}
    search_of()
    after = load("mine")
    assert not tuning.search_plan("mine", mine.get).missing
    assert {c.epsilon for c in after.configs("tuning_between")} == {2}
    assert len(after.configs("tuning_between")) == 4
    assert {m: after.config(m, "cifar10", 2, 5) for m in nearest} == nearest
    own = {c.method: c for c in after.configs("between")}
    assert own["dp-sgd"].eta == 16.0 != nearest["dp-sgd"].eta
    assert own["dp-ngd"].eta * own["dp-ngd"].C / own["dp-ngd"].lambda_safe**0.5 == pytest.approx(16.0)
    assert own["dp-ngd-free"] == after.config("dp-ngd-free", "cifar10", 2, 5)
    assert tuning.winner(after, "dp-sgd", "cifar10", 2, "tuning_between") == {"eta": 16.0, "T": 8}
    table, *_ = tables.grid_search(Runs.of(after.configs("tuning_between"), map(mine.get, after.configs(
        "tuning_between"))), after, "tuning_between")
    assert list(table["chosen η"]) == ["16", f"{own['dp-ngd'].eta:g}"]


def test_only_a_search_apart_can_be_asked_for(mine):
    state(BETWEEN.replace("search: [tuning_between]", "search: [tuning_betwen]"))
    with pytest.raises(UsageError, match="unknown search 'tuning_betwen': did you mean 'tuning_between'"):
        load("mine")
    state(BETWEEN.replace("search: [tuning_between]", "search: [tuning]"))
    with pytest.raises(UsageError, match="unknown search 'tuning'"):
        load("mine")


CHOICE = MINE + """
artifacts:
  mean_choice:
    methods: [dp-sgd, gep, dp-ngd, dp-ngd-free]
    cells: {cifar10: [1, 8]}
    vary: {choice: [mean]}
    seeds: [5]
"""


def test_the_best_finalist_by_mean_is_for_the_artifact_that_asks_for_it(mine, monkeypatch):
    """The rule takes the smaller rate of two that are as good within a standard error; `choice: mean` takes the better
    one. DP-SGD keeps its own, since all other rates follow from it."""
    state(CHOICE)

    def accuracy(c):  # seeds differ by more than finalists do
        return near(c, 2.0) + (c.seed == 79) / 5

    assert not load("mine").configs("mean_choice"), "no run at settings that nobody has chosen"
    search(mine, monkeypatch, accuracy)
    profile = load("mine")
    tuned = profile.settings["tuned"]
    assert "dp-sgd" not in tuned["by_mean"]
    assert set(tuned["by_mean"]) == {m for m in tuned["methods"] if m != "dp-sgd" and not METHODS[m].arm_of}
    runs = {(c.method, c.epsilon): c for c in profile.configs("mean_choice")}
    for epsilon in (1, 8):
        for m in ("dp-sgd", "dp-ngd-free"):
            assert runs[m, epsilon] == profile.config(m, "cifar10", epsilon, 5)
        for m in ("gep", "dp-ngd"):
            axes = tuned["by_mean"][m]["cifar10"][epsilon]
            assert runs[m, epsilon] == profile.config(m, "cifar10", epsilon, 5, choice="mean")
            trials = [*profile.trials(m, "cifar10", epsilon), *profile.second(m, "cifar10", epsilon)]
            means = {}
            for a, repeats in profile.repeats(m, "cifar10", epsilon):
                own = [c for b, c in trials if b == a] + repeats
                means[str(a)] = sum(mine.get(c)["accuracy"] for c in own) / len(own)
            assert means[str(axes)] == max(means.values())
    assert any(tuned["by_mean"][m]["cifar10"][e] != tuned["methods"][m]["cifar10"][e]
               for m in ("gep", "dp-ngd") for e in (1, 8)), "made so that the two choices differ"
    ngd = runs["dp-ngd", 1]
    assert ngd.eta * ngd.C / ngd.lambda_safe**0.5 == pytest.approx(profile.eta_sgd("cifar10", 1, ngd.T)[0], rel=1e-5)


def test_a_choice_that_does_not_exist(mine):
    state(CHOICE.replace("choice: [mean]", "choice: [maen]"))
    with pytest.raises(UsageError, match=r"mean_choice\.vary\.choice: unknown choice 'maen': did you mean 'mean'"):
        load("mine")


def test_a_search_that_does_not_exist(mine):
    with pytest.raises(UsageError, match="search 'tunign'"):
        command.tune(["mine", "--only", "tunign"])


def test_winners_at_the_edge_of_all_that_was_tried_are_named(mine, monkeypatch, capsys):
    monkeypatch.setattr(tuning, "Store", lambda name: mine)
    search(mine, monkeypatch, lambda c: 0.3 + 0.01 * math.log2(c.eta) if c.method == "dp-sgd" else near(c, 0.9))
    profile = load("mine")
    assert tuning.edges(profile, "dp-sgd", "cifar10", 1) == ["eta"], "two values of T have no inside"
    assert command.tune(["mine", "--show"]) == 0
    out = capsys.readouterr().out
    assert "DP-SGD             cifar10          epsilon 1    eta=8 T=8; at the edge of its grid: eta" in out
    assert "missing" not in out


def test_shards_of_a_round_are_its_trials_and_choose_nothing(mine, monkeypatch):
    rounds = []
    monkeypatch.setattr(tuning.sweep, "ensure", lambda configs, store, jobs, seconds: rounds.append(configs))
    told = [tuning.train_trials_of_shard("mine", mine, 1, f"{i}/4") for i in range(1, 5)]
    keys = [c.key() for part in rounds for c in part]
    assert sorted(keys) == sorted(c.key() for c in tuning.search_plan("mine", mine.get).missing)
    assert told[0].startswith(f"shard 1/4: its {len(rounds[0])} trials are stored; when all shards have ended")
    assert not (paths.PARAMS / "tuned").exists()


@pytest.mark.parametrize("options", [["--shard", "0/2"], ["--shard", "1/2", "--show"]])
def test_shards_that_are_none(options):
    with pytest.raises(UsageError, match="shard"):
        command.tune(["quick", *options])


def test_the_tables_show_trials_repeats_winners_and_edges(mine, monkeypatch):
    search(mine, monkeypatch, lambda c: near(c, 1.0) + (c.seed == 79) / 100)
    profile = load("mine")
    configs = profile.configs("tuning")
    runs = Runs.of(configs, map(mine.get, configs))
    shown, name, _, every = tables.grid_search(runs, profile)
    assert (name, len(every)) == ("tuning", len(runs))
    sgd = shown[(shown["method"] == "DP-SGD") & (shown["ε"] == "8")].iloc[0]
    assert (sgd["trials"], sgd["repeats"], sgd["chosen η"]) == (10, 4, "1")
    assert sgd["validation accuracy"].startswith("50.3 [")
    finalists = tables.finalists(runs, profile)
    rows = finalists[(finalists["method"] == "DP-NGD") & (finalists["ε"] == "1")]
    assert sorted(rows["won"]) == ["", "won"]
    state(SIMPLE)
    assert tables.finalists(runs, profiles.untuned("mine")) is None, "nothing is repeated"


# ---- Files that do not fit -------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("before", "after"), [
    ("eta: [0.5, 1.0, 2.0]", "eta: [0.5, 1.0, 4.0]"), ("dp-sgd: {T: 8}", "dp-sgd: {T: 9}"),
    ("tuning:\n", "data: {cifar10: {N: 40000}}\ntuning:\n"), ("tuning:\n", "defaults: {B: 512}\ntuning:\n")])
def test_what_was_chosen_for_other_settings_is_refused_in_one_line(mine, monkeypatch, before, after):
    search(mine, monkeypatch, lambda c: near(c, 1.0))
    state(MINE.replace(before, after, 1))
    said = (r"^tuned/mine.yaml was chosen for other settings or another grid than params/mine.yaml has now: undo that "
            r"change, or run `dpngd tune mine` again$")
    with pytest.raises(UsageError, match=said):
        load("mine")
    search(mine, monkeypatch, lambda c: near(c, 1.0))  # it starts from what is stated
    assert load("mine").config("dp-sgd", "cifar10", 1, 0).eta == 1.0


def test_what_no_trial_takes_may_change_after_the_tuning(mine, monkeypatch):
    search(mine, monkeypatch, lambda c: near(c, 1.0))
    state("seeds: [0]\nartifacts: {bound: {seeds: [1]}}\ncost: {start: 1.0}\n" + MINE.replace(
        "methods: {", "methods: {dp-ngd-free: {T: 9}, dp-ngd-kl: {kl_budget: 5.0}, "))
    assert load("mine").config("dp-sgd", "cifar10", 1, 0).eta == 1.0


GOOD = "digest: {digest}\neta_sgd: {{cifar10: {{1: {{8: 2.0}}}}}}\nmethods: {methods}\n"


@pytest.mark.parametrize(("methods", "message"), [
    ("{dp-sgdd: {cifar10: {1: {T: 8}}}}", "unknown method 'dp-sgdd'"),
    ("{gep: {cifar1: {1: {T: 8}}}}", "unknown data set 'cifar1'"),
    ("{gep: {cifar10: {1: {rat: 2}}}}", "unknown field 'rat'"),
    ("{gep: {cifar10: {T: 8}}}", "gep cifar10: must be a table by epsilon"),
    ("{dp-ngd: {cifar10: {1: {T: 8, rate: 2.0}}}}", "dp-ngd cifar10 epsilon 1: breaks the equation of section 3.3"),
    ("{dp-ngd: {cifar10: {1: {eta: 2.0}}}}", "dp-ngd cifar10 epsilon 1: breaks the equation .* give lambda_safe"),
    ("{dp-sgd: {cifar10: {1: {T: 16}}}}", "dp-sgd cifar10 epsilon 1: eta_sgd has no rate at its T = 16"),
])
def test_a_mistake_in_the_file_of_winners(mine, methods, message):
    (paths.PARAMS / "tuned").mkdir()
    digest = params.digest(params.settings("mine"))
    (paths.PARAMS / "tuned" / "mine.yaml").write_text(GOOD.format(digest=digest, methods=methods))
    with pytest.raises(UsageError, match=f"^tuned/mine.yaml: {message}") as caught:
        load("mine")
    assert "\n" not in str(caught.value)
    good = GOOD.format(digest=digest, methods="{dp-sgd: {cifar10: {1: {T: 8}}}}")
    (paths.PARAMS / "tuned" / "mine.yaml").write_text(good)
    assert load("mine").config("dp-sgd", "cifar10", 1, 0).T == 8
    (paths.PARAMS / "tuned" / "mine.yaml").write_text("dp-sgd: {cifar10: {T: 1.0}}")
    with pytest.raises(UsageError, match="was chosen for other settings"):
        load("mine")


@pytest.mark.parametrize("grid", ["[1.0]", "{rate: 1.0}", "[{rate: []}]"])
def test_a_grid_of_no_axes_is_named(mine, grid):
    state(f"tuning: {{grid: {{dp-sgd: {grid}}}}}")
    with pytest.raises(UsageError, match="must be a table of axis"):
        load("mine")


def test_finalists_have_seeds_of_their_own(mine):
    state(MINE.replace("[78, 79]", "[2]"))
    with pytest.raises(UsageError, match="seed 2 is used for tuning and for results"):
        load("mine")


def test_records_of_another_version_are_refused_in_one_line(mine, monkeypatch):
    config = load("mine").config("dp-sgd", "cifar10", 1, 0)
    mine.put(config, record(config, 0.5))
    mine.export()
    run.check_version(mine)
    monkeypatch.setattr("dpngd.training.config.RECORD_VERSION", 99)
    monkeypatch.setattr(run, "RECORD_VERSION", 99)
    said = (r"^results/mine.jsonl: 1 of 1 records are not of record version 99 \(the first is [0-9a-f]{16}\): remove "
            r"the file, or train again with --refresh")
    with pytest.raises(UsageError, match=said) as caught:
        run.check_version(mine)
    assert "\n" not in str(caught.value)


# ---- The gate --------------------------------------------------------------------------------------------------------

GATED = MINE + """
gate:
  cells: {cifar10: [1, 8], svhn: [1, 8]}
  N: {cifar10: [25000, 12500, 6250], svhn: [24000, 12000]}
  B: [256, 512, 1024]
  points: {cifar10: 10, svhn: 5}
  T: 8
"""


def gate_of(store, monkeypatch, gain):
    """`dpngd tune mine --gate`, where DP-SGD gains gain(N, B) points; the settings in the order tried."""
    tried = []

    def ensure(configs, store, jobs, seconds):
        tried.extend(dict.fromkeys((c.data, c.N, c.B) for c in configs))
        for c in configs:
            at_best = c.eta == (0.5 if c.epsilon == 1 else 1.5)
            points = (gain(c.data, c.N, c.B) if c.epsilon == 8 else 0) - 2 * (not at_best)
            store.put(c, record(c, 0.4 + points / 100 + (c.seed - 1000) / 1000))

    monkeypatch.setattr(tuning.sweep, "ensure", ensure)
    return tuning.run_gate("mine", store, 1), tried


def test_the_gate_takes_the_largest_N_that_passes_then_the_smallest_B_that_still_does(mine, monkeypatch):
    state(GATED)
    gains = {25000: 7, 12500: 12, 6250: 15, 24000: 3, 12000: 4}
    found, tried = gate_of(mine, monkeypatch, lambda d, N, B: gains[N] - (B == 256) * 5)
    assert found["cifar10"]["passed"] == {"N": 12500, "B": 512}
    assert [t for t in tried if t[0] == "cifar10"] == [
        ("cifar10", 25000, 256), ("cifar10", 25000, 512), ("cifar10", 25000, 1024), ("cifar10", 12500, 256),
        ("cifar10", 12500, 512)]
    row = found["cifar10"]["tried"][-1]
    assert (row["accuracy"], row["eta"], row["points"]) == ([40.0, 52.0], [0.5, 1.5], 12.0), "each at its best rate"
    assert found["svhn"]["passed"] is None
    text = tuning.gate_text(profiles.untuned("mine"), found)
    assert "cifar10     12500   512  40.0 -> 52.0 (eta 0.5, 1.5): +12.0 points of 10" in text
    assert "svhn      no setting passes: claims about epsilon are not testable here" in text
    assert params.written("mine", "-gate") == found
    assert profiles.untuned("mine").gate_path("cifar10") == [t[1:] for t in tried if t[0] == "cifar10"]
    assert gate_of(mine, monkeypatch, None)[1] == [], "it goes on from what is stored"


def test_a_profile_is_tuned_in_the_setting_that_passed(mine, monkeypatch):
    state(GATED)
    with pytest.raises(UsageError, match="the gate of mine has not been run on cifar10: run `dpngd tune mine --gate`"):
        tuning.search("mine", mine, 1)
    gate_of(mine, monkeypatch, lambda d, N, B: 20)
    said = "params/mine.yaml has N = 50000, B = 4096 for cifar10, but the gate chose N = 25000, B = 256: state these"
    with pytest.raises(UsageError, match=said):
        tuning.search("mine", mine, 1)
    state(GATED + "data: {cifar10: {N: 25000, B: 256}, svhn: {N: 24000, B: 256}}\n")
    tuning.check_gate(profiles.untuned("mine"))


def test_a_profile_without_a_gate(mine):
    with pytest.raises(UsageError, match="mine has no gate: state its cells, N, B and points"):
        tuning.run_gate("mine", mine, 1)
    tuning.check_gate(profiles.untuned("mine"))


@pytest.mark.parametrize("name", profile_names())
def test_shipped_winners_are_those_of_the_shipped_trials(name):
    """Nothing is typed by hand: the files of gate, trials and winners follow from results/<profile>.jsonl.

    The searches on a second network and at another epsilon come after the first: until one is complete, none of its
    winners is written."""
    store = Store(name)
    if not store.shipped_path.exists() or not params.written(name):
        pytest.skip(f"{name} ships no results of its search: its trials are run live, or not yet")
    found, written = tuning.search_plan(name, store.get), params.written(name)
    stated = profiles.untuned(name)
    searched = {s: {profiles.place(d, stated.kept(s)) for d in stated.settings[s]["cells"]} for s in params.SEARCHES}
    open_still = set().union(*searched.values()) - found.done
    assert not searched["tuning"] & open_still
    assert not open_still & set(written["eta_sgd"]), "winners of a search that is not complete"

    def complete(by_method):
        """Without the places where the search goes on."""
        rows = {m: {where: r for where, r in places.items() if where not in open_still}
                for m, places in by_method.items()}
        return {m: places for m, places in rows.items() if places}

    trials = params.written(name, "-trials")
    assert written["eta_sgd"] == {w: r for w, r in found.tuned["eta_sgd"].items() if w not in open_still}
    assert written["methods"] == complete(found.tuned["methods"])
    assert {part: trials[part] for part in found.trials} == {part: complete(t) for part, t in found.trials.items()}
    assert tuning.gate(profiles.untuned(name), store.get)[0] == params.written(name, "-gate")


def test_the_expected_best_of_k_trials():
    values = [3.0, 1.0, 4.0, 1.5, 9.0]
    for k in range(1, 6):
        every = [max(chosen) for chosen in itertools.combinations(values, k)]
        assert tuning.expected_best(values, k) == pytest.approx(sum(every) / len(every))
