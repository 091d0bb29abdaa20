"""Every question of ours can come out each way, on made-up runs with known answers."""

import pytest
from claim_runs import BY_ID, ORDER, QUICK, SEEDS, artifact, table, wobble, word
from suite_records import runs_of

from dpngd.suite import claims, profiles


@pytest.mark.parametrize(("peak", "verdict"), [(2.0, "reproduced"), (-2.0, "not reproduced")])
def test_own_budget_compares_peaks_wherever_they_lie(peak, verdict):
    """DP-NGD is best with 20 steps, the baselines with 40: at no common budget are those two compared."""
    def accuracy(c):
        best = 20 if c.method == "dp-ngd" else 40
        return 60 - abs(c.T - best) / 2 + (peak if c.method == "dp-ngd" else 0) + wobble(c)

    runs = runs_of(artifact("convergence"), accuracy)
    row = claims.decide(BY_ID["own-budget"], {"convergence": runs})
    assert row["verdict"] == verdict
    assert "20 steps against 40 of" in row["ours"]


@pytest.mark.parametrize(("lead", "verdict"), [(2.0, "reproduced"), (-2.0, "not reproduced")])
def test_the_fraction_of_the_steps_is_taken_of_the_baselines_peak(lead, verdict):
    """Their peak is at 40 steps, so DP-NGD is judged with 17, not with the 20 that are also there."""
    def accuracy(c):
        if c.method == "dp-ngd":
            return (60 + lead if c.T == 17 else 60 - lead) + wobble(c)
        return 60 - (40 - c.T) / 2 + wobble(c)

    sources = {n: runs_of(artifact(n), accuracy) for n in ("convergence", "fraction")}
    row = claims.decide(BY_ID["fraction-of-steps"], sources)
    assert row["verdict"] == verdict
    assert "(17 steps against 40 of" in row["ours"]


def test_no_budget_within_the_fraction_is_not_run():
    runs = runs_of(artifact("convergence"), lambda c: (99 if c.T == 10 and c.method != "dp-ngd" else 50) + wobble(c))
    row = claims.decide(BY_ID["fraction-of-steps"], {"convergence": runs, "fraction": runs_of([], lambda c: 50)})
    assert (row["verdict"], row["ours"]) == ("not run", "not run")


@pytest.mark.parametrize(("late", "verdict"), [(1.0, "reproduced"), (9.0, "not reproduced")])
def test_the_lead_fades_or_does_not(late, verdict):
    lead = {10: 20.0, 20: 5.0, 40: late}  # of quick's budgets, the second and the last are compared
    assert word("lead-fades", runs_of(artifact("convergence"), lambda c: 50 + wobble(c) + (
        lead[c.T] if c.method == "dp-ngd" else 0))) == verdict


@pytest.mark.parametrize(("gain", "verdict"), [(3.0, "reproduced"), (-3.0, "not reproduced")])
def test_longer_pretraining_takes_the_best_steps_of_each_size(gain, verdict):
    def accuracy(c):
        best = {50: 30, 5000: 300}[c.public_size]
        return 60 + (gain if c.public_size == 5000 else 0) - 8 * (c.pt_steps != best) + 0.1 * c.seed * (c.pt_steps > 50)

    runs = runs_of(profiles.load("cpu").configs("pretraining", seeds=SEEDS), accuracy)
    row = claims.decide(BY_ID["longer-pretraining"], {"pretraining": runs})
    assert row["verdict"] == verdict
    assert "5000 images, 300 steps, over 50, 30" in row["ours"]


def test_any_source_compares_with_dp_sgd():
    gain = {"photos": 3, "noise": 2, "dead-leaves": 2}
    good = runs_of(artifact("sources"), lambda c: 60 + gain.get(c.public, 0) * (c.method == "dp-ngd") + wobble(c))
    assert word("any-source", good) == "reproduced"
    assert word("any-source", runs_of(artifact("sources"), lambda c: 60 - 5 * (c.public is not None) + wobble(c))) \
        == "not reproduced"


@pytest.mark.parametrize(("gain", "verdict"), [(3.0, "reproduced"), (-3.0, "not reproduced")])
def test_other_networks(gain, verdict):
    runs = runs_of(artifact("networks"), lambda c: 60 + gain * (c.method == "dp-ngd") + wobble(c))
    assert word("other-networks", runs) == verdict
    assert "model=small, K=1" in claims.decide(BY_ID["other-networks"], {"networks": runs})["ours"]


@pytest.mark.parametrize(("gain", "verdict"), [(3.0, "reproduced"), (-3.0, "not reproduced")])
def test_most_views_are_compared_at_half_the_rate(gain, verdict):
    """Neither the whole rate, nor fewer views, nor another network count."""
    cpu = profiles.load("cpu")
    half = {c.key() for c in cpu.configs("networks_half")}

    def accuracy(c):
        if c.model == "small" and c.K == 4:
            return (60 if c.method == "dp-sgd" else 60 + gain if c.key() in half else 10) + wobble(c)
        return (60 - 9 * gain if c.method == "dp-ngd" else 60) + wobble(c)

    sources = {n: runs_of(cpu.configs(n), accuracy) for n in ("networks", "networks_half")}
    row = claims.decide(BY_ID["most-views"], sources)
    assert row["verdict"] == verdict
    assert row["mean"] == pytest.approx(gain, abs=0.2)


@pytest.mark.parametrize(("gain", "verdict"), [(3.0, "direction only"), (-3.0, "not reproduced")])
def test_equal_trials(gain, verdict):
    """One data set gives one difference, and so a direction; the best trials are compared, not the means."""
    trials = QUICK.configs("tuning")
    last = {c.method: c.key() for c in trials}
    runs = runs_of(trials, lambda c: 50 + (20 + gain * (c.method == "dp-ngd")) * (c.key() == last[c.method]))
    row = claims.decide(BY_ID["equal-trials"], {"tuning": runs})
    assert row["verdict"] == verdict
    count = len([c for c in trials if c.method == "dp-sgd"])
    assert row["ours"] == f"digits ε=4 {gain:+.2f} points (best of {count} trials)"


def test_a_search_that_is_not_complete_has_no_best_trial():
    trials = QUICK.configs("tuning")
    last = [c for c in trials if c.method == "dp-sgd"][-1]
    values = {c.key(): 50.0 for c in trials if c != last}
    row = claims.decide(BY_ID["equal-trials"], {"tuning": runs_of(trials, lambda c: values[c.key()])})
    assert (row["verdict"], row["ours"]) == ("not run", "not run")


def test_equal_trials_on_three_data_sets():
    trials = profiles.load("cpu").configs("tuning")
    lead = {"cifar10": 3.0, "svhn": 4.0, "utkface": 3.5}
    assert word("equal-trials", runs_of(trials, lambda c: 50 + lead[c.data] * (c.method == "dp-ngd"))) == "reproduced"


def test_the_clamped_share_of_a_run():
    runs = runs_of(artifact("ablation_floor"), table(ORDER))
    row = claims.decide(BY_ID["clamped-share"], {"ablation_floor": runs})
    assert row["verdict"] == "reproduced"
    assert "90.0% of the eigenvalues at the first look, 80.0% at the fewest, 80.0% at the last" in row["ours"]
    for r in runs.where(method="dp-ngd").records:
        r["diagnostics"]["along"][1]["clamped_share"] = 0.4
    assert word("clamped-share", runs) == "not reproduced"


def test_answers_are_sentences():
    for claim in claims.all_claims():
        if claim.question:
            assert claim.question.endswith("?")
            said = claims.answer(claims.decide(claim, {}))
            assert said == f"{claim.sentence} Not run yet."


@pytest.mark.parametrize(("lead", "verdict"), [(3.0, "reproduced"), (-3.0, "not reproduced")])
def test_half_the_rate_is_compared_with_the_rivals_best(lead, verdict):
    configs = artifact("rates")
    half = {m: min(c.eta for c in configs if c.method == m) for m in ("dp-sgd", "dp-ngd")}

    def accuracy(c):
        if c.method == "dp-ngd":
            return (70 + lead if c.eta == half["dp-ngd"] else 40) + wobble(c)
        return (50 if c.eta == half["dp-sgd"] else 70) + wobble(c)

    row = claims.decide(BY_ID["half-rate"], {"rates": runs_of(configs, accuracy)})
    assert row["verdict"] == verdict
    assert row["mean"] == pytest.approx(lead, abs=0.2)


@pytest.mark.parametrize(("cost", "verdict"), [(3.0, "reproduced"), (-3.0, "not reproduced")])
def test_curvature_that_is_hardly_ever_estimated(cost, verdict):
    def accuracy(c):
        return 70 - (cost if c.T_cur == 32 else 0) + 0.1 * ((c.seed + c.T_cur) % 3)

    assert word("once-only", runs_of(artifact("robustness"), accuracy)) == verdict


@pytest.mark.parametrize(("drop", "verdict"), [(3.0, "reproduced"), (-3.0, "not reproduced")])
def test_private_curvature_is_judged_where_it_is_released_most_often(drop, verdict):
    """What it does with fewer releases does not count."""
    def accuracy(c):
        released = {None: 0, 1: -drop, 8: +drop}[c.T_cur]
        return 60 + released + wobble(c)

    methods = ["dp-sgd-pt", "dp-ngd-private-20", "dp-ngd-private-50"]
    runs = runs_of(artifact("releases", methods=methods), accuracy)
    row = claims.decide(BY_ID["often-released"], {"releases": runs})
    assert row["verdict"] == verdict
    assert row["ours"].count("dp-sgd-pt over dp-ngd-private-") == 2


@pytest.mark.parametrize(("change", "verdict"), [(0.3, "reproduced"), (3.0, "not reproduced")])
def test_open_choices_at_half_the_rate(change, verdict):
    runs = runs_of(artifact("open_choices"), lambda c: 60 + change * (c.method != "dp-ngd") + wobble(c))
    row = claims.decide(BY_ID["open-choices-half"], {"open_choices": runs})
    assert row["verdict"] == verdict
    assert "labels" not in row["ours"], "quick does not ask for those"
    assert runs.values("eta") == [min(c.eta for c in artifact("rates") if c.method == "dp-ngd")]


@pytest.mark.parametrize(("lead", "verdict"), [(3.0, "reproduced"), (-3.0, "not reproduced")])
def test_half_the_rate_against_the_arms(lead, verdict):
    """DP-NGD's whole rate and the arms without a rate of their own do not count; nor do cells that have no arms."""
    rates = artifact("rates") + artifact("rates", epsilons=[1])
    half = min(c.eta for c in rates if c.method == "dp-ngd")

    def accuracy(c):
        if c.method == "dp-ngd":
            return (70 if c.eta == half else 10) + wobble(c)
        return (99 if c.method.rsplit("-", 1)[1] in ("clamp", "exact", "random", "sgd") else 70 - lead) + wobble(c)

    names = BY_ID["half-rate-arms"].source.split("+")
    sources = {n: runs_of(rates if n == "rates" else artifact(n), accuracy) for n in names}
    row = claims.decide(BY_ID["half-rate-arms"], sources)
    assert row["verdict"] == verdict
    assert "of 6 reproduced" in row["ours"]
    assert row["planned"] == len({c.key() for s in sources.values() for c in s.configs})
    del sources["rates"]  # without them the tuned rate would pass for half of it
    assert claims.decide(BY_ID["half-rate-arms"], sources)["verdict"] == "not run"
