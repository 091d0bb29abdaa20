"""The grid search: who wins, what is written, and that the other runs use it."""

import itertools

import pytest

from dpngd.errors import UsageError
from dpngd.suite import command, params, paths, tables, tuning
from dpngd.suite.profiles import load, profile_names
from dpngd.suite.runs import Runs
from dpngd.suite.store import Store

GRID = """
tuning:
  cells: {cifar10: [2]}
  seeds: [77]
  repeat: {best: 1, seeds: []}
  arms: {dp-ngd-pre: [cifar10]}
  grid:
    dp-sgd: {rate: [0.5, 1.0, 2.0], T: [0.5, 1.0]}
    gep: {rate: [1.0, 2.0, 4.0], C0+C1: [[1.0, 2.0], [3.0, 4.0]]}
    dp-ngd: {rate: [0.5, 1.0, 2.0], lambda_safe: [0.04, 0.09]}
    dp-ngd-pre: {rate: [0.5, 1.0]}
tuning_networks: {repeat: {best: 1, seeds: []}}
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A profile `mine` of its own folder, and its store."""
    (tmp_path / "paper.yaml").write_text((paths.PARAMS / "paper.yaml").read_text())
    (tmp_path / "mine.yaml").write_text(GRID)
    monkeypatch.setattr(paths, "PARAMS", tmp_path)
    return Store("mine", root=tmp_path / "store", results=tmp_path / "results")


def fill(store, accuracy):
    for config in load("mine").configs("tuning"):
        if store.get(config) is None:
            store.put(config, {"accuracy": accuracy(config), "status": "ok", "evaluated_on": "validation"})


def test_the_best_trial_wins_and_every_other_run_uses_it(mine):
    before = load("mine")
    assert not [c for c in before.configs("tuning") if c.method == "dp-ngd-pre"], "an arm waits for its method"
    base = {m: before.config(m, "cifar10", 4, 0) for m in ("dp-sgd", "gep", "dp-ngd", "dp-ngd-pre")}
    best = {"dp-sgd": lambda c: c.eta == 4.0 and c.T == 660, "gep": lambda c: c.C0 == 3.0 and c.eta < 1,
            "dp-ngd": lambda c: c.lambda_safe == 0.09 and c.eta == pytest.approx(0.03)}
    fill(mine, lambda c: 0.5 + 0.1 * best[c.method](c))
    assert tuning.write_chosen("mine", mine) == {
        "dp-sgd": {"cifar10": {"rate": 2.0, "T": 0.5}},
        "gep": {"cifar10": {"rate": 1.0, "C0": 3.0, "C1": 4.0}},
        "dp-ngd": {"cifar10": {"rate": 0.5, "lambda_safe": 0.09}},
    }
    after = load("mine")
    now = {m: after.config(m, "cifar10", 4, 0) for m in base}
    assert (now["dp-sgd"].eta, now["dp-sgd"].T) == (2 * base["dp-sgd"].eta, base["dp-sgd"].T / 2)
    assert (now["gep"].C0, now["gep"].C1, now["gep"].eta) == (3.0, 4.0, pytest.approx(2 / 5))
    assert now["dp-ngd"].eta == pytest.approx(0.5 * 2.0 * 0.3 / 10), "half of what the rule gives at that floor"
    assert now["dp-ngd"].lambda_base == pytest.approx(0.09 / 4)
    assert now["dp-ngd-pre"].lambda_safe == 0.09, "an arm follows its method"
    assert after.config("dp-sgd", "svhn", 4, 0) == before.config("dp-sgd", "svhn", 4, 0)
    trials = [c.key() for c in after.configs("tuning")]
    assert trials[: len(trials) - 2] == [c.key() for c in before.configs("tuning")], "the search stays where it was"


def test_then_the_arms_find_their_rate(mine):
    fill(mine, lambda c: 0.1 + c.eta / 100)  # the largest rate
    tuning.write_chosen("mine", mine)
    fill(mine, lambda c: 0.9 - c.eta)  # the smallest
    assert tuning.write_chosen("mine", mine)["dp-ngd-pre"] == {"cifar10": {"rate": 0.5}}
    profile = load("mine")
    assert profile.tuned("dp-ngd", "cifar10")["rate"] == 2.0
    assert profile.tuned("dp-ngd-pre", "cifar10") == {"rate": 1.0, "lambda_safe": 0.09}
    ngd, pre = (profile.config(m, "cifar10", 2, 0) for m in ("dp-ngd", "dp-ngd-pre"))
    assert pre.eta * pre.C / pre.lambda_safe == pytest.approx(0.5 * ngd.eta * ngd.C / ngd.lambda_safe**0.5, rel=1e-5)


def test_another_network_is_searched_for_itself(mine):
    before = load("mine")
    other = before.configs("tuning_networks")
    assert {c.model for c in other} == {"resnet-20"}
    for config in other:
        mine.put(config, {"accuracy": 0.5 + (config.eta > 15), "status": "ok"})
    assert tuning.write_chosen("mine", mine)["dp-sgd"] == {"cifar10/resnet-20": {"rate": 8.0}}
    after = load("mine")
    assert after.config("dp-sgd", "cifar10", 2, 0, model="resnet-20").eta == 16.0
    assert after.config("dp-sgd", "cifar10", 2, 0) == before.config("dp-sgd", "cifar10", 2, 0)
    assert after.config("dp-sgd", "cifar10", 2, 0, model="small").eta == before.config("dp-sgd", "cifar10", 2, 0).eta


def test_winners_at_the_edge_of_their_grid_are_named(mine, capsys):
    fill(mine, lambda c: 0.9 - abs(c.eta - 2.0) if c.method == "dp-sgd" else 0.1 + c.eta / 100)
    tuning.write_chosen("mine", mine)
    profile = load("mine")
    assert tuning.edges(profile, "dp-sgd", "cifar10") == [], "rate 1 of 0.5, 1, 2; two values of T have no inside"
    assert tuning.edges(profile, "dp-ngd", "cifar10") == ["rate"]
    assert command.tune(["mine", "--show"]) == 0
    out = capsys.readouterr().out
    assert "lambda_safe=0.09; at the edge of its grid: rate" in out
    assert out.count("edge") == 2  # GEP's too


def test_a_grid_of_blocks_searches_one_number_of_steps_more_widely(mine):
    (paths.PARAMS / "mine.yaml").write_text(GRID.replace("dp-sgd: {rate: [0.5, 1.0, 2.0], T: [0.5, 1.0]}", """
      dp-sgd:
        - {T: [1.0], rate: [0.5, 1.0, 2.0, 4.0]}
        - {T: [0.5, 1.0], rate: [0.5, 2.0]}""".replace("\n      ", "\n    ")))
    runs = [(c.T, c.eta) for c in load("mine").configs("tuning") if c.method == "dp-sgd"]
    assert sorted(runs) == [(660, 1.0), (660, 4.0), (1320, 1.0), (1320, 2.0), (1320, 4.0), (1320, 8.0)], "each once"
    for winner, edges in (((1320, 2.0), []), ((1320, 8.0), ["rate"]), ((660, 4.0), [])):  # at 660: only two rates
        for config in load("mine").configs("tuning"):
            mine.put(config, {"accuracy": 0.5 + ((config.T, config.eta) == winner), "status": "ok"})
        tuning.write_chosen("mine", mine)
        assert tuning.edges(load("mine"), "dp-sgd", "cifar10") == edges


@pytest.mark.parametrize("grid", ["[1.0]", "{rate: 1.0}", "[{rate: []}]"])
def test_a_grid_of_no_axes_is_named(mine, grid):
    (paths.PARAMS / "mine.yaml").write_text(f"tuning: {{grid: {{dp-sgd: {grid}}}}}")
    with pytest.raises(UsageError, match="must be a table of axis"):
        load("mine")


REPEATED = GRID.replace("repeat: {best: 1, seeds: []}\n  arms", "repeat: {best: 2, seeds: [78, 79]}\n  arms")


def test_the_best_of_one_seed_must_be_best_with_more(mine):
    """A setting that is ahead with the first seed and collapses with another one does not win."""
    (paths.PARAMS / "mine.yaml").write_text(REPEATED)
    sgd = {1.0: {77: 0.50, 78: 0.48, 79: 0.49}, 2.0: {77: 0.60, 78: 0.60, 79: 0.10}, 4.0: {77: 0.40}}

    def accuracy(c):
        return sgd[c.eta][c.seed] if (c.method, c.T) == ("dp-sgd", 1320) else 0.2 + c.eta / 100

    fill(mine, accuracy)
    assert "dp-sgd" not in tuning.write_chosen("mine", mine), "its repeats are missing"
    assert params.stored_finalists("mine")["dp-sgd"] == {"cifar10": [{"rate": 1.0, "T": 1.0}, {"rate": 0.5, "T": 1.0}]}
    repeats = [c for c in load("mine").configs("tuning") if c.method == "dp-sgd" and c.seed != 77]
    assert sorted((c.eta, c.seed) for c in repeats) == [(1.0, 78), (1.0, 79), (2.0, 78), (2.0, 79)]
    assert all(c.validation == 0.1 for c in repeats)
    fill(mine, accuracy)
    assert tuning.write_chosen("mine", mine)["dp-sgd"] == {"cifar10": {"rate": 0.5, "T": 1.0}}


def test_a_setting_that_diverged_with_some_seed_does_not_win(mine):
    (paths.PARAMS / "mine.yaml").write_text(REPEATED)
    fill(mine, lambda c: 0.5 + c.eta / 100)
    tuning.write_chosen("mine", mine)
    assert params.stored_finalists("mine")["dp-sgd"]["cifar10"] == [{"rate": 2.0, "T": 0.5}, {"rate": 2.0, "T": 1.0}]
    fill(mine, lambda c: None if (c.method, c.T, c.seed) == ("dp-sgd", 660, 79) else 0.3)
    assert tuning.write_chosen("mine", mine)["dp-sgd"]["cifar10"] == {"rate": 2.0, "T": 1.0}


def test_repeats_have_seeds_of_their_own(mine):
    (paths.PARAMS / "mine.yaml").write_text(REPEATED.replace("[78, 79]", "[2]"))
    with pytest.raises(UsageError, match="seed 2 is used for tuning and for results"):
        load("mine")


def test_the_search_goes_on_until_nothing_changes(mine, monkeypatch):
    (paths.PARAMS / "mine.yaml").write_text(REPEATED)
    rounds = []

    def ensure(configs, store, jobs, seconds):
        rounds.append(len(configs))
        for config in configs:
            store.put(config, {"accuracy": 0.5 + config.eta / 1000, "status": "ok"})

    monkeypatch.setattr(tuning.sweep, "ensure", ensure)
    found = tuning.search("mine", mine)
    assert set(found) == {"dp-sgd", "gep", "dp-ngd", "dp-ngd-pre"}
    new = [after - before for before, after in itertools.pairwise([0, *rounds])]
    assert new == [30, 12, 2, 4, 0], "the methods, their repeats, the arm, its repeats, nothing more"
    assert tuning.choose_winners(load("mine"), mine) == found


def test_shards_of_a_round_are_its_trials_and_choose_nothing(mine, monkeypatch):
    rounds = []
    monkeypatch.setattr(tuning.sweep, "ensure", lambda configs, store, jobs, seconds: rounds.append(configs))
    told = [tuning.train_trials_of_shard("mine", mine, 1, f"{i}/4") for i in range(1, 5)]
    keys = [c.key() for part in rounds for c in part]
    assert sorted(keys) == sorted(c.key() for c in tuning.present_trials(load("mine")))
    assert told[0].startswith(f"shard 1/4: its {len(rounds[0])} trials are stored; when all shards have ended")
    assert not (paths.PARAMS / "tuned").exists()


@pytest.mark.parametrize("options", [["--shard", "0/2"], ["--shard", "1/2", "--show"]])
def test_shards_that_are_none(options):
    with pytest.raises(UsageError, match="shard"):
        command.tune(["quick", *options])


def test_the_tables_show_trials_repeats_winners_and_edges(mine):
    (paths.PARAMS / "mine.yaml").write_text(REPEATED)
    for _ in range(2):
        fill(mine, lambda c: 0.5 + c.eta / 1000 + (c.seed == 79) / 100)
        tuning.write_chosen("mine", mine)
    profile = load("mine")
    configs = profile.configs("tuning")
    runs = Runs.of(configs, map(mine.get, configs))
    shown, name, _, every = tables.grid_search(runs, profile)
    assert (name, len(every)) == ("tuning", len(runs))
    sgd = shown.set_index("method").loc["DP-SGD"]
    assert (sgd["trials"], sgd["repeats"], sgd["best η"], sgd["at the edge of its grid"]) == (6, 4, "4", "rate")
    assert sgd["validation accuracy"].startswith("50.7 [")
    finalists = tables.finalists(runs, profile)
    rows = finalists[finalists["method"] == "DP-SGD"]
    assert list(rows["won"]) == ["won", ""]
    assert list(rows["seed 79"]) == ["51.4", "51.4"]
    (paths.PARAMS / "mine.yaml").write_text(GRID)
    assert tables.finalists(runs, load("mine")) is None, "nothing is repeated"


def test_equals_and_runs_that_ended_badly(mine):
    fill(mine, lambda c: None if c.eta <= 1.0 and c.method == "dp-sgd" else 0.5)
    found = tuning.write_chosen("mine", mine)
    assert found["dp-sgd"]["cifar10"]["rate"] == 1.0, "of equals the smallest rate, diverged runs apart"


def test_a_search_with_a_trial_missing_has_no_winner(mine):
    assert tuning.write_chosen("mine", mine) == {}
    assert not (paths.PARAMS / "tuned").exists()
    configs = load("mine").configs("tuning")
    for config in configs[:-1]:
        mine.put(config, {"accuracy": 0.5, "status": "ok"})
    assert set(tuning.write_chosen("mine", mine)) == {c.method for c in configs} - {configs[-1].method}


def test_a_mistake_in_the_file_of_winners(mine):
    (paths.PARAMS / "tuned").mkdir()
    for text, message in (("dp-sgdd: {svhn: {rate: 1}}", "unknown method 'dp-sgdd'"),
                          ("dp-sgd: {svnh: {rate: 1}}", "unknown data set 'svnh'"),
                          ("dp-sgd: {svhn: {rat: 1}}", "unknown field 'rat'")):
        (paths.PARAMS / "tuned" / "mine.yaml").write_text(text)
        with pytest.raises(UsageError, match=f"^tuned/mine.yaml: {message}"):
            load("mine")


@pytest.mark.parametrize("name", profile_names())
def test_shipped_winners_are_those_of_the_shipped_trials(name):
    """Nothing is typed by hand: the files of finalists and winners follow from results/<profile>.jsonl."""
    store = Store(name)
    if not store.shipped_path.exists():
        pytest.skip(f"{name} ships no results: its trials are run live")
    assert tuning.choose_finalists(load(name), store) == params.stored_finalists(name)
    assert tuning.choose_winners(load(name), store) == params.stored_winners(name)


def test_the_expected_best_of_k_trials():
    values = [3.0, 1.0, 4.0, 1.5, 9.0]
    for k in range(1, 6):
        every = [max(chosen) for chosen in itertools.combinations(values, k)]
        assert tuning.expected_best(values, k) == pytest.approx(sum(every) / len(every))
