"""Every claim of the paper can come out each way: the rules are tried on made-up runs with known answers."""

import pytest
from claim_runs import BASE, BY_ID, ORDER, QUICK, artifact, table, wobble, word
from suite_records import runs_of

from dpngd.suite import claims, rules, stats, study
from dpngd.suite.params import published
from dpngd.suite.rules import Chi, Theory
from dpngd.suite.runs import Runs


def test_ids_are_unique_and_sources_exist():
    assert len(BY_ID) == len(claims.all_claims())
    for claim in claims.all_claims():
        assert claim.notebook in study.ARTIFACTS
        if claim.source not in claims.MEASURED:
            assert set(claim.source.split("+")) <= set(study.ARTIFACTS[claim.notebook])
        assert bool(claim.paper) is not bool(claim.question)


def test_every_artifact_of_the_paper_decides_something():
    used = {name for c in claims.all_claims() for name in c.source.split("+")}
    shown = {a for group in study.ARTIFACTS.values() for a in group}
    chooses_only = {"tuning_networks"}  # the rates of `networks`: it shows no more
    assert shown - chooses_only == used - set(claims.MEASURED)


def test_the_papers_leads_are_those_of_its_text():
    leads = claims.paper_leads()
    for row in published()["utility_table"]["text"][:2]:
        assert leads[row["data"], row["epsilon"]] == pytest.approx(row["value"], abs=0.005)
    assert all(lead > 0 for lead in leads.values())
    assert BY_ID["best-everywhere"].paper == "all 15 cells, by 0.04 to 4.78 points"


@pytest.mark.parametrize("name", [c.id for c in claims.all_claims()])
def test_without_runs_a_claim_is_not_run(name):
    row = claims.decide(BY_ID[name], {})
    assert (row["verdict"], row["ours"], row["n"]) == ("not run", "not run", 0)
    if BY_ID[name].source not in claims.MEASURED:
        sources = {s: runs_of(artifact(s) if s != "tuning" else [], lambda c: {}["none"])
                   for s in BY_ID[name].source.split("+")}
        assert claims.decide(BY_ID[name], sources)["verdict"] == "not run"


@pytest.mark.parametrize(("ngd", "verdict"), [(66.0, "reproduced"), (63.03, "direction only"),
                                              (60.0, "not reproduced")])
def test_best_everywhere(ngd, verdict):
    assert word("best-everywhere", runs_of(artifact("utility_table"), table({**BASE, "dp-ngd": ngd}))) == verdict


def test_best_everywhere_is_against_the_best_baseline():
    values = {**BASE, "dp-sgd": 70.0}
    row = claims.decide(BY_ID["best-everywhere"],
                        {"utility_table": runs_of(artifact("utility_table"), table(values))})
    assert "-4.0" in row["ours"]
    assert row["verdict"] == "not reproduced"


def test_a_cell_that_was_not_run_keeps_the_claim_open():
    runs = runs_of(artifact("utility_table"), lambda c: {4.0: BASE[c.method]}[c.epsilon] + wobble(c))
    row = claims.decide(BY_ID["best-everywhere"], {"utility_table": runs})
    assert row["verdict"] == "direction only"
    assert "digits ε=1 not run" in row["ours"]


@pytest.mark.parametrize(("small", "large", "verdict"), [(8.0, 1.0, "reproduced"), (1.0, 8.0, "not reproduced")])
def test_stricter_larger(small, large, verdict):
    lead = {1.0: small, 4.0: large}
    runs = runs_of(artifact("utility_table"),
                   lambda c: 60 + wobble(c) + (lead[c.epsilon] if c.method == "dp-ngd" else 0))
    assert word("stricter-larger", runs) == verdict


@pytest.mark.parametrize(("field", "more", "verdict"), [
    ("epsilon_rdp", 1e-3, "reproduced"), ("sigma", 1e-11, "reproduced"), ("sigma", 1e-6, "not reproduced"),
    ("epsilon_prv", 1e-11, "not reproduced")])
def test_same_privacy_fails_with_a_single_run(field, more, verdict):
    """Rounding apart: sigma of another machine may end in other digits, what is spent may not exceed the budget."""
    runs = runs_of(artifact("utility_table"), table(BASE))
    runs.records[0]["privacy"][field] *= 1 + more
    assert word("same-privacy", runs) == verdict


def test_every_budget_and_fewer_steps():
    def accuracy(c, ahead):
        return 50 + c.T / 2 + (ahead if c.method == "dp-ngd" else 0) + wobble(c)

    faster = runs_of(artifact("convergence"), lambda c: accuracy(c, 16))
    assert word("every-budget", faster) == "reproduced"
    assert word("fewer-steps", faster) == "reproduced"  # DP-NGD at 10 steps has the baselines' 40-step accuracy
    slower = runs_of(artifact("convergence"), lambda c: accuracy(c, -1))
    assert word("every-budget", slower) == "not reproduced"
    assert word("fewer-steps", slower) == "not reproduced"
    theirs, ours = rules.steps_to_peak(slower, ["dp-sgd-pt", "adadps"])
    assert set(theirs.values()) == {40}
    assert set(ours.values()) == {41}, "never reached counts as more than the largest budget"


@pytest.mark.parametrize(("slope", "verdict"), [(0.0, "reproduced"), (5.0, "not reproduced")])
def test_few_images(slope, verdict):
    size = {50: 0.0, 150: 0.5, 500: 1.0}
    runs = runs_of(artifact("sample_efficiency"), lambda c: 60 + slope * size[c.public_size] + 0.1 * c.seed)
    assert word("few-images", runs) == verdict


def test_baselines_need_images_and_stay_behind():
    def rising(c):
        return 50 + c.public_size / 100 * (c.method != "dp-ngd") + 10 * (c.method == "dp-ngd") + wobble(c)

    runs = runs_of(artifact("sample_efficiency"), rising)
    assert word("baselines-need-images", runs) == "reproduced"
    assert word("ahead-with-images", runs) == "reproduced"
    flat = runs_of(artifact("sample_efficiency"), lambda c: 50 - 10 * (c.method == "dp-ngd") + wobble(c))
    assert word("baselines-need-images", flat) != "reproduced"
    assert word("ahead-with-images", flat) == "not reproduced"


def test_a_claim_with_runs_missing_is_not_reproduced_yet():
    configs = artifact("utility_table")
    whole = runs_of(configs, table(BASE))
    runs = Runs(configs, {k: r for k, r in whole.found.items() if (r["config"]["method"], r["config"]["seed"])
                          != ("gep", 2)})
    row = claims.decide(BY_ID["best-everywhere"], {"utility_table": runs})
    assert row["verdict"] == "direction only"
    assert claims.seeds_text(row) == f"3 ({len(runs)} of {len(configs)} runs)"
    assert claims.decide(BY_ID["best-everywhere"], {"utility_table": whole})["verdict"] == "reproduced"


def test_less_than_half_of_the_runs_decide_nothing():
    """One budget of a curve would say that nobody is faster."""
    configs = artifact("convergence")
    runs = runs_of(configs, lambda c: {40: 50.0}[c.T] + wobble(c))
    row = claims.decide(BY_ID["fewer-steps"], {"convergence": runs})
    assert row["verdict"] == "not run"
    assert row["ours"] != "not run", "what there is is shown"
    assert claims.seeds_text(row) == f"3 ({len(configs) // 3} of {len(configs)} runs)"


@pytest.mark.parametrize("name", ["private-curvature", "public-curvature", "clipping-space", "dynamic-floor",
                                  "mapping-back", "open-choices"])
def test_ablations_come_out_both_ways(name):
    source = BY_ID[name].source
    right = runs_of(artifact(source), lambda c: ORDER[c.method] + wobble(c))
    wrong = runs_of(artifact(source), lambda c: 100 - ORDER[c.method] + 5 * (c.method == "dp-ngd-labels-exact")
                    + 3 * (c.method in ("dp-ngd-factor-clamp", "dp-ngd-labels-random")) + wobble(c))
    assert word(name, right) == "reproduced"
    assert word(name, wrong) == "not reproduced"


def test_no_floor_must_blow_up():
    def losses(config):
        return [2.0, 5.0] if config.method == "dp-ngd-no-floor" else [2.0, 1.0]

    configs = artifact("ablation_floor")
    assert word("no-floor", runs_of(configs, lambda c: 50.0, losses=losses)) == "reproduced"
    assert word("no-floor", runs_of(configs, lambda c: None if c.method == "dp-ngd-no-floor" else 50.0)) == "reproduced"
    assert word("no-floor", runs_of(configs, lambda c: 50.0)) == "not reproduced"


def test_dynamic_loss():
    def losses(config):
        late = {"dp-ngd": 0.5}.get(config.method, 0.8) + 0.01 * config.seed * (config.method == "dp-ngd")
        return [2.0] * (config.T // 4) + [late] * (config.T - config.T // 4)

    assert word("dynamic-loss", runs_of(artifact("ablation_floor"), lambda c: 50.0, losses=losses)) == "reproduced"
    assert word("dynamic-loss", runs_of(artifact("ablation_floor"), lambda c: 50.0)) == "not reproduced"


@pytest.mark.parametrize(("extra", "cost", "time"), [(1.5, "reproduced", "reproduced"),
                                                     (20.0, "not reproduced", "not reproduced")])
def test_time(extra, cost, time):
    def seconds(config):
        step = (extra if config.method == "dp-ngd" else 1.0) * (1 + 0.01 * config.seed)
        return {"gradients": step * config.T, "setup": 100.0, "evaluation": 50.0}  # neither is a step's

    runs = runs_of(artifact("overhead"), lambda c: 50 + c.T / 2 + 16 * (c.method == "dp-ngd") + wobble(c),
                   seconds=seconds)
    assert word("step-cost", runs) == cost
    assert word("total-time", runs) == time


def test_step_cost_is_against_the_papers_multiple():
    assert claims.paper_step_cost()["cifar10"] == pytest.approx(38.2 / 14.2)
    runs = runs_of(artifact("overhead"), lambda c: 50.0,
                   seconds=lambda c: {"gradients": (2.5 if c.method == "dp-ngd" else 1.0) * c.T})
    assert rules.step_cost({"digits": 2.0})(runs).word == "not reproduced"
    assert rules.step_cost({"digits": 3.0})(runs).word == "reproduced"


def test_seconds_are_compared_within_one_machine():
    """DP-NGD's first budgets were run on a machine of half the speed, where DP-SGD-PT was not."""
    runs = runs_of(artifact("overhead"), lambda c: 50 + c.T / 2 + wobble(c),
                   seconds=lambda c: {"gradients": (4.0 if (c.method, c.T) == ("dp-ngd", 10) else 2.0) * c.T})
    for record in runs.where(method="dp-ngd", T=10).records:
        record["where"]["rounding"] = "another"
    row = claims.decide(BY_ID["step-cost"], {"overhead": runs})
    assert row["mean"] == pytest.approx(1.0)
    assert set(rules.side_by_side(runs).values("T")) == {20, 40}
    assert len(rules.side_by_side(runs.where(method="dp-ngd"))) == len(runs.where(method="dp-ngd"))


@pytest.mark.parametrize(("cost", "verdict"), [(1.5, "reproduced"), (4.0, "not reproduced")])
def test_step_cost_in_a_report_of_the_benchmark(cost, verdict):
    rounds = [1.0, 1.1, 1.3]
    report = {"models": {"wrn-16-4": {"contenders": {"dp-sgd": {"seconds": rounds},
                                                     "dp-ngd": {"seconds": [cost * s for s in rounds]}}}}}
    row = claims.decide(BY_ID["step-cost-bench"], {"bench": report})
    assert (row["verdict"], row["n"], row["mean"]) == (verdict, 3, pytest.approx(1 / cost))
    old = {"models": {"wrn-16-4": {"contenders": {"dp-sgd": {"median": 1.0}, "dp-ngd": {"median": 2.0}}}}}
    assert claims.decide(BY_ID["step-cost-bench"], {"bench": old})["verdict"] == "not run"


def test_robustness_varies_one_field_at_a_time():
    configs = artifact("robustness")
    bad_p = runs_of(configs, lambda c: 60 - 9 * (c.p == 2) + 0.01 * c.seed)
    assert word("exponent", bad_p) == "not reproduced"
    assert word("warm-up", bad_p) == "reproduced"
    assert word("rare-updates", bad_p) == "reproduced"
    rare = runs_of(configs, lambda c: 60 - 3 * (c.T_cur == 32) + wobble(c))
    assert word("too-rare", rare) == "reproduced"
    assert word("too-rare", runs_of(configs, lambda c: 60 + 3 * (c.T_cur == 32) + wobble(c))) == "not reproduced"


def test_theory_notices_what_is_off():
    good = Theory([Chi("m", 1.001, 20000)] * 2, [(Chi("b", 1.02, 5000), 1.0, 1.0)] * 3, [],
                  [{"quadratic": 0.9, "realised": 0.5, "bound": 1.0, "clipped": False}] * 2,
                  [{"squared": 0.9, "bound": 1.0, "safe": True, "slack": 0.01}] * 2)
    off = Theory([Chi("m", 1.2, 20000)] * 2, [(Chi("b", 1.3, 5000), 1.0, 1.0)] * 3, [],
                 [{"quadratic": 1.1, "realised": 0.5, "bound": 1.0, "clipped": True}] * 2,
                 [{"squared": 1.5, "bound": 1.0, "safe": True, "slack": 0.01}] * 2)
    for claim in (c for c in claims.all_claims() if c.source == "theory"):
        assert claims.decide(claim, {"theory": good})["verdict"] == "reproduced"
        assert claims.decide(claim, {"theory": off})["verdict"] == "not reproduced"


def test_rows_are_json():
    import json

    one = runs_of(QUICK.configs("utility_table", seeds=[0]), table(BASE))
    row = claims.decide(BY_ID["stricter-larger"], {"utility_table": one})
    assert row["low"] is None
    assert row["verdict"] in (stats.DIRECTION, stats.NOT_REPRODUCED)
    assert json.loads(json.dumps(row, allow_nan=False)) == row
