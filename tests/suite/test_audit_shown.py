"""The stored audit as a table and as a figure."""

import json
from statistics import NormalDist

import numpy as np
import pytest

from dpngd import audit
from dpngd.audit import leaks, statistics
from dpngd.audit.checks import LEVEL, Result
from dpngd.audit.figure import counts, distance, limit
from dpngd.errors import UsageError
from dpngd.suite import figures, paths, tables


def stored(passed=True):
    """What `dpngd audit --json` prints, of two subjects."""
    lines = [Result("gep", "noise, channel 0", "1.0003 sigma C over 1,000 numbers (z = 0.3)", "1", True, "1 %", LEVEL),
             Result("gep", "noise, channel 1", "0.9987 sigma C over 1,000 numbers (z = 0.3)", "1", True, "1 %", LEVEL),
             Result("gep", "canary, mu", "mu >= 3.176 (estimate 3.383)", "1/sigma = 3.448", True, "10 %", LEVEL),
             Result("dp-sgd", "sensitivity", "0.999990 C (nan beside 7; 273 pairs)", "1 C", passed, seconds=1.5),
             Result("dp-sgd", "accounting", "epsilon 3.987 to 3.992 of 12 releases at sigma 1.3", "4", True)]
    report = audit.Report(lines, {"gep": ([3.0, 4.0, 99.0], [0.0, -0.5, -99.0], 3.448)}, 3.0, 2.0)
    return json.loads(json.dumps(report.to_dict(), allow_nan=False))


def test_the_table_has_a_row_per_subject():
    shown, name, caption, data = tables.audit(stored())
    assert name == "audit"
    assert shown["subject"].tolist() == ["gep", "dp-sgd"]
    gep, sgd = shown.to_dict("records")
    assert (gep["noise"], gep["canary, 1/σ allowed"]) == ("1.0003 sigma C; 0.9987 sigma C", "mu >= 3.176, limit 3.448")
    assert (sgd["one sample moves a sum by"], sgd["spends"]) == ("0.999990 C", "epsilon 3.987 to 3.992")
    assert (sgd["passed"], len(data)) == ("2 of 2", 5)
    assert "0 of 5 tests failed; 3 are statistical" in caption
    assert tables.audit(stored(passed=False))[0]["passed"].tolist() == ["3 of 3", "1 of 2"]


def test_the_figure_counts_every_score(tmp_path):
    held = stored()["canary"]["gep"]
    assert (sum(held["in"]), sum(held["out"])) == (3, 3)
    assert (held["in"][-1], held["out"][0]) == (1, 1), "scores beyond the bins are in the last ones"
    figure = figures.canary(stored())
    top, rows = figure.axes
    assert top.get_title(loc="left").startswith("GEP: 3 + 3 releases, σ = 0.290")
    assert [t.get_text() for t in rows.get_yticklabels()] == ["GEP"]
    said = next(t.get_text() for t in figure.texts if "wholly beyond" in t.get_text()).replace("\n", " ")
    assert "Of 1 intervals of 95% 0 lie wholly beyond 1; by chance a few do." in said
    assert any("commit" in t.get_text() for t in figure.texts)
    figure.savefig(tmp_path / "canary.png")
    with pytest.raises(UsageError, match="no canary"):
        figures.canary({**stored(), "canary": {}})


def test_the_measured_distance_is_that_of_the_scores():
    scores = [NormalDist().inv_cdf((i + 0.5) / 2000) for i in range(2000)]
    at, half = distance(counts([s + 2.0 for s in scores], scores, 2.1))
    assert at == pytest.approx(2.0, abs=0.01)
    assert half == pytest.approx(1.96 * (2 / 2000 + 2.0**2 / 8000) ** 0.5, rel=0.01)


def test_the_tick_is_where_the_lower_limit_is_what_sigma_allows():
    scores = np.array([NormalDist().inv_cdf((i + 0.5) / 2000) for i in range(2000)])
    held = counts(scores, scores, 3.448)
    tick = limit(held, LEVEL)
    assert statistics.mu_lower(scores + tick * scores.std(ddof=1), scores, LEVEL)[1] == pytest.approx(3.448, rel=1e-6)
    assert 1.05 < tick / 3.448 < 1.08


def test_the_shipped_rows_pass_where_the_tick_says_so():
    held = json.loads(paths.AUDIT.read_text(encoding="utf-8"))
    for line in (x for x in held["lines"] if x["test"] == "canary, mu"):
        estimate = float(line["measured"].partition("estimate ")[2].split(",")[0].rstrip(")"))
        assert (estimate <= limit(held["canary"][line["subject"]], held["level"])) == line["passed"], line["subject"]


def test_the_shipped_distances_are_the_audits_own_estimates():
    held = json.loads(paths.AUDIT.read_text(encoding="utf-8"))
    for line in (x for x in held["lines"] if x["test"] == "canary, mu"):
        estimate = float(line["measured"].partition("estimate ")[2].split(",")[0].rstrip(")"))
        at, half = distance(held["canary"][line["subject"]])
        assert at == pytest.approx(estimate, abs=half / 2), line["subject"]


def test_the_self_test_has_a_row_per_leak():
    from dpngd.audit.report import outcome_dict

    found = leaks.Finding("q counted half", "accounting", "factor 2", True, "accounting (7.0)", True, "", "0.5 %", 0.31)
    missed = leaks.Finding("another", "noise", "2 %", False, "", False, "noise (0.98)", "nothing", 0.2)
    printed = json.dumps({"leaks": [outcome_dict(o) for o in (found, missed)]})
    shown, name, caption, _ = tables.self_test(json.loads(printed))
    assert name == "audit_self_test"
    assert shown["found by"].tolist() == ["accounting (7.0)", "MISSED"]
    assert shown["control"].tolist() == ["clean", "FLAGGED"]
    assert caption.startswith("Planted leaks: 1 of 2 found")


def test_the_shipped_audit_passed_for_every_method():
    from dpngd.methods import METHODS

    held = json.loads(paths.AUDIT.read_text(encoding="utf-8"))
    assert held["passed"]
    assert {line["subject"] for line in held["lines"]} >= {*METHODS, "Opacus optimizer", "sampler", "release mode"}
    assert set(held["canary"]) >= {*METHODS, "Opacus optimizer"}
    leaks_found = json.loads(paths.SELF_TEST.read_text(encoding="utf-8"))
    assert leaks_found["passed"]
    assert [row["leak"] for row in leaks_found["leaks"]] == [leak.name for leak in leaks.leaks()]
