"""The sigma of a run is the same in the run, in the list of runs and in the table of budgets."""

import pytest

from dpngd.methods import spends_of
from dpngd.suite import profiles, run, theory

QUICK = profiles.load("quick")


def test_the_table_of_budgets_has_the_sigma_of_the_run():
    """Also for private curvature, which leaves only part of the budget for the gradients."""
    rows = {r["method"]: r for r in theory.privacy_rows(QUICK, "ablation_decoupling")}
    configs = {c.method: c for c in QUICK.configs("ablation_decoupling")}
    assert {"dp-ngd", "dp-ngd-private-20", "dp-ngd-private-50"} <= set(rows)
    for method, row in rows.items():
        c = configs[method]
        assert row["sigma"] == spends_of(c, c.B / c.N, c.N)[0].sigma
        assert c.epsilon - 0.001 <= row["spent"] <= c.epsilon < row["spent_rdp"]
    assert rows["dp-ngd"]["sigma"] < rows["dp-ngd-private-20"]["sigma"] < rows["dp-ngd-private-50"]["sigma"]


@pytest.mark.parametrize("method", ["dp-ngd", "dp-ngd-private-20", "dp-ngd-private-50"])
def test_the_list_of_runs_has_the_sigma_of_the_run(method):
    c = QUICK.config(method, "digits", 4.0, 0)
    assert run.noise_of(c) == (c.B / c.N, f"{spends_of(c, c.B / c.N, c.N)[0].sigma:.3f}")
    validated = c.replace(validation=0.2)  # a smaller private set, so a larger q
    q, sigma = run.noise_of(validated)
    assert q == c.B / (c.N - round(0.2 * c.N))
    assert float(sigma) > float(run.noise_of(c)[1])
