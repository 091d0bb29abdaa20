"""Tables behind the figures: one row per point, with mean, interval and n, the paper's number beside it."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from dpngd.data import sets
from dpngd.methods import METHODS, spends_of
from dpngd.suite import stats, tuning
from dpngd.suite.claims import paper_step_cost
from dpngd.suite.params import published
from dpngd.suite.profiles import Profile, place
from dpngd.suite.rules import (
    Curves,
    Theory,
    above,
    benched,
    best_baseline,
    cell_name,
    estimated,
    part_said,
    side_by_side,
)
from dpngd.suite.runs import NOT_STEPS, Runs, seconds_per_step, step_phases
from dpngd.suite.story import listed
from dpngd.training.config import FIELDS, RunConfig

Table = tuple[pd.DataFrame, str, str, pd.DataFrame]
"""What `Study.table` takes: the table that is shown, its name, its caption, all numbers."""
OWN = ("lambda_safe", "lambda_base", "pt_steps", "adadps_e", "C0", "C1")  # parameters that a method has for itself


# ---- Accuracy, for every notebook ------------------------------------------------------------------------------------

def paper_accuracy(artifact: str, method: str, data: str, epsilon: float) -> float | None:
    """The paper's accuracy of this cell in this table; None where it has none."""
    section = published().get(artifact, {})
    mean = section.get("mean", {})
    by_data = mean.get(data, {}) if artifact == "utility_table" else mean if section.get("data") == data else {}
    if method in by_data and epsilon in section["epsilons"]:
        return by_data[method][section["epsilons"].index(epsilon)]
    for row in section.get("text", []):
        if (row.get("method"), section.get("data"), section.get("epsilon")) == (method, data, epsilon) \
                and row["name"] == "accuracy":
            return row["value"]
    return None


def accuracy(runs: Runs, artifact: str, *axes: str) -> pd.DataFrame:
    """One row for each method, cell and value of the axes."""
    rows = []
    for method in runs.methods():
        mine = runs.where(method=method)
        for data, epsilon in mine.cells():
            here = mine.where(data=data, epsilon=epsilon)
            for values in _combinations(here, axes):
                at = here.where(**values)
                e = at.mean()
                ran = len(at)
                rows.append({
                    "method": METHODS[method].label, "name": method, "data": data, "epsilon": epsilon, **values,
                    "accuracy": e.mean, "sd": e.sd, "low": e.low, "high": e.high, "n": e.n,
                    "diverged": at.diverged(), "not_run": len(at.configs) - ran,
                    "paper": paper_accuracy(artifact, method, data, epsilon) if not axes else None,
                })
    return pd.DataFrame(rows, columns=["method", "name", "data", "epsilon", *axes, "accuracy", "sd", "low", "high",
                                       "n", "diverged", "not_run", "paper"])


def _combinations(runs: Runs, axes: tuple[str, ...]) -> list[dict]:
    seen = dict.fromkeys(tuple(getattr(c, a) for a in axes) for c in runs.configs)
    return [dict(zip(axes, values, strict=True)) for values in seen]


def shown(table: pd.DataFrame, *axes: str) -> pd.DataFrame:
    """For people: mean ± half the interval, n, and the paper's number."""
    def ours(row: pd.Series) -> str:
        if not row["n"]:
            return "not run"
        half = (row["high"] - row["low"]) / 2
        spread = f" ± {half:.1f}" if math.isfinite(half) and half > 0 else ""
        bad = f", {row['diverged']} diverged: chance" if row["diverged"] else ""
        return f"{row['accuracy']:.1f}{spread} (n={row['n']}{bad})"

    groups = list(zip(table["method"], table["data"], table["epsilon"], strict=True))
    first = {group: i for i, group in enumerate(dict.fromkeys(groups))}
    table = table.iloc[sorted(range(len(table)), key=lambda i: (first[groups[i]], *(
        _order(table[axis].iloc[i]) for axis in axes)))]
    out = table[["method", "data", "epsilon", *axes]].copy()
    out["data"], out["epsilon"] = out["data"].map(sets.label), out["epsilon"].map("{:g}".format)
    for axis in axes:
        out[axis] = [_value(axis, value) for value in out[axis]]
    out["accuracy, 95% interval"] = [ours(row) for _, row in table.iterrows()]
    if table["paper"].notna().any():
        out["paper, its own network"] = table["paper"].map(lambda v: "" if v is None or pd.isna(v) else f"{v:.2f}")
    return out.rename(columns={"data": "data set", "epsilon": "ε", **AXES})


AXES = {"public_size": "public images", "public": "public set", "pt_steps": "pre-training steps", "model": "network",
        "K": "views per image", "N": "private images", "T": "steps", "T_cur": "steps between refreshes"}


def _value(axis: str, value: object) -> str:
    """A value of an axis in words."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "all" if axis == "N" else "none"
    if isinstance(value, str):
        return sets.label(value) if axis == "public" else value
    if axis == "T_cur" and value >= 1000:
        return "once"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:g}"


def _order(value: object) -> tuple[bool, float, str]:
    """Numbers by size, names by letter, what is not there first."""
    there = not (value is None or (isinstance(value, float) and math.isnan(value)))
    number = float(value) if there and not isinstance(value, str) else 0.0
    return there, number, value if isinstance(value, str) else ""


# ---- One run ---------------------------------------------------------------------------------------------------------

def resolved(profile: Profile, config: RunConfig, artifact: str) -> Table:
    """Every value of a run, and where it comes from: a file of params/, the search, the paper's equation, a default, or
    what the artifact varies."""
    usual, origins = profile.resolve(config.method, config.data, config.epsilon, config.seed)
    same, values = usual.canonical(), config.canonical()
    rows = [{"field": name, "value": f"{values[name]}",
             "from": f"varied by {artifact}" if same.get(name) != values[name] else
             "the cell" if origins.get(name) == "given" else origins.get(name, "")}
            for name in FIELDS if name in values]
    table = pd.DataFrame(rows)
    return table, "config", f"One run: {METHODS[config.method].label} on {sets.label(config.data)} at ε = " \
                            f"{config.epsilon:g}, seed {config.seed}, as resolved", table


def spent(config: RunConfig, record: dict | None) -> Table:
    """What a run spends: noise, budget under both accountants, time; of a run that does not exist, its noise."""
    if record is None:
        N = config.N - round(config.N * config.validation)
        parts = [(s.purpose, s.sigma, s.releases(config.T)) for s in spends_of(config, config.B / N, N)]
        rows = {"q = B/N": f"{config.B / N:.5f}", "result": "not run yet"}
    else:
        p, d, s = record["privacy"], record["diagnostics"], record["seconds"]
        parts = [(part["purpose"], part["sigma"], part["releases"]) for part in p["parts"]]
        reached = "diverged" if record["accuracy"] is None else f"{100 * record['accuracy']:.2f} %"
        rows = {"q = B/N": f"{p['q']:.5f}", "ε spent, PRV accountant": f"{p['epsilon_prv']:.3f} of {config.epsilon:g}",
                "RDP's looser bound on ε": f"{p['epsilon_rdp']:.3f}", "δ": f"{p['delta']:g}",
                "clipped samples": f"{100 * d['clipped']:.0f} %", f"{record['evaluated_on']} accuracy": reached,
                "seconds, one core": f"{s['total']:.1f}"}
    noise = {f"σ of the {purpose}": f"{sigma:.3f} over {releases} releases" for purpose, sigma, releases in parts}
    table = pd.DataFrame([{"what": k, "value": v} for k, v in (noise | rows).items()])
    return table, "spent", "What it spends", table


# ---- Notebook 01: Table 2 --------------------------------------------------------------------------------------------

LEADERS = ("dp-ngd", "dp-ngd-free")


def leads(runs: Runs) -> pd.DataFrame:
    """The lead over the best baseline, by cell: of DP-NGD, and of DP-NGD with nothing to tune; the paper's beside it.

    The intervals are those of the claim `best-everywhere`: they pool their variance over the epsilons of a data set
    and a baseline. The best baseline is the one with the highest mean in the cell, which favours it."""
    rows = []
    for method in (m for m in LEADERS if m in runs.methods()):
        tests = [above(runs.where(data=d, epsilon=e), cell_name((d, e)), {"method": method}, {"method": m}, (d, m))
                 for d, e in runs.cells() for m in runs.where(data=d, epsilon=e).baselines()]
        of = [(d, e, m) for d, e in runs.cells() for m in runs.where(data=d, epsilon=e).baselines()]
        found = {place: e for place, (_, e) in zip(of, estimated(tests), strict=True)}
        for d, e in runs.cells():
            rival = best_baseline(runs.where(data=d, epsilon=e))
            lead = found[d, e, rival["method"]] if rival else None
            if lead is None or lead.n == 0:
                continue
            theirs = [paper_accuracy("utility_table", m, d, e) for m in ("dp-ngd", *runs.baselines())]
            paper = theirs[0] - max(theirs[1:]) if method == "dp-ngd" and None not in theirs else None
            rows.append({"method": METHODS[method].label, "name": method, "data": d, "epsilon": e,
                         "best baseline": METHODS[rival["method"]].label, "lead": lead.mean, "sd": lead.sd,
                         "low": lead.low, "high": lead.high, "n": lead.n, "images": lead.images, "paper": paper})
    return pd.DataFrame(rows, columns=["method", "name", "data", "epsilon", "best baseline", "lead", "sd", "low",
                                       "high", "n", "images", "paper"])


def leads_shown(found: pd.DataFrame) -> pd.DataFrame:
    """`leads` for people: data sets by their names, the lead with its interval in one column."""
    there = found["paper"].notna()
    return pd.DataFrame({
        "method": found["method"], "data set": found["data"].map(sets.label), "ε": found["epsilon"].map("{:g}".format),
        "best baseline": found["best baseline"],
        "lead, 95% interval": [
            f"{r.lead:+.2f}" + (f" [{r.low:.2f}, {r.high:.2f}]" if math.isfinite(r.high - r.low) else "")
            for r in found.itertuples()],
        "n": found["n"], "the paper's lead": found["paper"].where(there, 0.0).map("{:+.2f}".format).where(there, "–")})


def matrix(table: pd.DataFrame) -> pd.DataFrame:
    """`accuracy` of Table 2 as the paper prints it: a row per data set and method, a column per epsilon, the highest
    mean of a data set and epsilon in bold (between two stars) once all methods have as many seeds."""
    rows = []
    for data, here in table.groupby("data", sort=False):
        cells = here.groupby("epsilon")
        best = cells["accuracy"].max().where(cells["n"].nunique() == 1)
        most = cells["n"].max()
        for method, mine in here.groupby("method", sort=False):
            row = {"data set": sets.label(data), "method": method}
            for line in mine.itertuples():
                half = (line.high - line.low) / 2
                text = stats.NOT_RUN if not line.n else f"{line.accuracy:.1f}" + (
                    f" ± {half:.1f}" if math.isfinite(half) and half > 0 else "") + (
                    f" ({line.diverged} diverged)" if line.diverged else "") + (
                    f" (n={line.n})" if line.n < most[line.epsilon] else "")
                row[f"ε = {line.epsilon:g}"] = f"**{text}**" if line.n and line.accuracy == best[line.epsilon] else text
            rows.append(row)
    return pd.DataFrame(rows).fillna("")


def seeds_counted(table: pd.DataFrame) -> str:
    """n = 8, or n = 3 to 8 as long as some runs are missing."""
    if table.empty:
        return "n = 0 seeds"
    return f"n = {' to '.join(dict.fromkeys(f'{n}' for n in (table['n'].min(), table['n'].max())))} seeds"


# ---- Notebook 00: privacy and the clamping schedule ------------------------------------------------------------------

RDP = "RDP's looser bound"


def privacy(theory: Theory, profile: Profile | None = None) -> Table:
    """sigma for every cell and method, and what it spends; with a profile also those that pay for curvature."""
    from dpngd.suite.theory import privacy_rows  # late: it needs torch

    paying = profile is not None and "ablation_decoupling" in profile.artifacts
    more = privacy_rows(profile, "ablation_decoupling") if paying else []
    there = {(row["data"], row["epsilon"], row["method"]) for row in theory.budget}
    data = pd.DataFrame([*theory.budget, *(r for r in more if (r["data"], r["epsilon"], r["method"]) not in there)])
    shown = pd.DataFrame({
        "method": data["method"].map(lambda m: METHODS[m].label), "data": data["data"],
        "ε": data["epsilon"].map("{:g}".format), "δ": data["delta"].map("{:g}".format),
        "q = B/N": data["q"].map("{:.4f}".format), "T": data["T"], "σ": data["sigma"].map("{:.3f}".format),
        "spent, PRV": data["spent"].map("{:.3f}".format), RDP: data["spent_rdp"].map("{:.3f}".format)})
    same = list(shown.columns[1:])  # methods with the same noise share a row
    shown = shown.groupby(same, sort=False)["method"].agg("; ".join).reset_index()[["method", *same]]
    shown = shown.assign(data=shown["data"].map(sets.label)).sort_values(["data", "ε"], kind="stable")
    return shown, "privacy", "Noise multiplier of every cell and method: a function of q, T and the budget alone", data


def cost() -> Table:
    """The paper's Table 1."""
    table = published()["privacy_table"]
    data = pd.DataFrame(table["rows"], columns=table["header"])
    return data, "privacy_cost", f"What the paper says is equal and what is not ({table['place']})", data


def schedule_of(profile: Profile) -> dict[str, Any]:
    """The clamping schedule of the first cell of the profile's Table 2 whose floor moves, and what `figures.schedule`
    says of it: which cell it is, and in which cells the floor is constant."""
    cells = {(c.data, c.epsilon): c for c in profile.configs("utility_table", methods=["dp-ngd"])}
    constant = {cell: c for cell, c in cells.items() if c.lambda_base == c.lambda_safe}
    config = next((c for cell, c in cells.items() if cell not in constant), next(iter(cells.values())))
    flat = [f"{sets.label(d)} at ε = {listed([f'{e:g}' for data, e in constant if data == d])}"
            for d in dict.fromkeys(data for data, _ in constant)]
    chosen = all("tuned" in profile.resolve(c.method, c.data, c.epsilon, c.seed)[1]["lambda_base"]
                 for c in constant.values())
    said = (f"On {listed(flat)} {'the search chose a constant floor' if chosen else 'the floor is constant'} (λ_base = "
            "λ_safe).") if flat else ""
    return {"lambda_safe": config.lambda_safe, "lambda_base": config.lambda_base, "T": config.T, "T1": config.T1,
            "p": config.p, "where": f"{sets.label(config.data)}, ε = {config.epsilon:g}", "said": said}


# ---- Notebook 02: the noise of each step budget ----------------------------------------------------------------------

def sigmas(runs: Runs) -> Table:
    """The noise of every step budget, as the runs recorded it."""
    rows = {}
    for config, record in runs.each():
        p = record["privacy"]
        rows.setdefault((config.data, config.epsilon, config.T), {
            "data": sets.label(config.data), "ε": f"{config.epsilon:g}", "T": config.T, "σ": round(p["sigma"], 3),
            "spent, PRV": round(p["epsilon_prv"], 3), RDP: round(p["epsilon_rdp"], 3)})
    table = pd.DataFrame([rows[k] for k in sorted(rows)], columns=["data", "ε", "T", "σ", "spent, PRV", RDP])
    return table, "sigmas", "Each step budget has its own noise", table


# ---- Notebook 05: time (Table 5) -------------------------------------------------------------------------------------

def seconds_by_phase(runs: Runs) -> pd.DataFrame:
    """Seconds per step by phase, mean over the runs of a method in a cell that the others were run beside."""
    runs, rows = side_by_side(runs), []
    for method in runs.methods():
        for data, epsilon in runs.cells():
            records = runs.where(method=method, data=data, epsilon=epsilon).records
            if records:
                phases = [step_phases(r) for r in records]
                names = sorted({n for p in phases for n in p} - set(NOT_STEPS))
                rows.append({"method": METHODS[method].label, "name": method, "data": data, "epsilon": epsilon,
                             "model": records[0]["config"]["model"], "runs": len(records),
                             "step": sum(map(seconds_per_step, records)) / len(records),
                             **{n: sum(p.get(n, 0.0) for p in phases) / len(phases) for n in names}})
    return pd.DataFrame(rows, columns=None if rows else ["method", "name", "data", "epsilon", "model", "runs", "step"])


def time_to_peak(runs: Runs) -> Table:
    """Table 5: steps and seconds to DP-SGD-PT's peak, of the mean curves over seeds, ours and the paper's."""
    rows = []
    for data, epsilon in runs.cells():
        here = runs.where(data=data, epsilon=epsilon)
        curves = Curves(here, ["dp-sgd-pt"])
        peak = curves.peak() if curves.seeds else None
        for method, steps in (("dp-sgd-pt", peak.theirs), ("dp-ngd", peak.ours)) if peak else ():
            records = side_by_side(here).where(method=method).records
            if records:
                step, there = sum(map(seconds_per_step, records)) / len(records), math.isfinite(steps)
                rows.append({"where": "ours, CPU core", "data": sets.label(data), "ε": f"{epsilon:g}",
                             "method": METHODS[method].label, "seconds per step": round(step, 3),
                             "steps to the peak": f"{'at most ' * (peak.bound and method == 'dp-ngd')}{steps:.1f}"
                                                  if there else "not reached",
                             "total": f"{steps * step:.1f} s" if there else "", "n": len(curves.seeds)})
    for data, epsilon, method, step, steps, hours in published()["overhead"]["rows"]:
        rows.append({"where": "paper, RTX 3090", "data": sets.label(data), "ε": f"{epsilon:g}",
                     "method": METHODS[method].label, "seconds per step": step, "steps to the peak": steps,
                     "total": f"{hours:g} h", "n": ""})
    table = pd.DataFrame(rows)
    return table, "time_to_peak", "Time to DP-SGD-PT's best accuracy (Table 5)", table


RATIOS = {
    "dp_sgd_over_plain": ("DP-SGD / training without privacy", "≤"),
    "opacus_over_dp_sgd": ("fastest mode of Opacus / DP-SGD", "≥"),
    "dp_ngd_over_dp_sgd": ("DP-NGD / DP-SGD, refresh included", "≤"),
    "gep_over_dp_sgd": ("GEP / DP-SGD", "≤"),
    "dp_ngd_memory_over_opacus": ("peak memory, DP-NGD / Opacus", "≤"),
}
"""The ratios of a bench report, in words, and on which side of its goal each should be."""


def bench_ratios(report: dict) -> Table:
    """Ratios of `dpngd bench` by network, with all threads and with one, beside their goals and the paper's Table 5."""
    paper = " and ".join(f"{v:.2f}" for v in sorted(paper_step_cost().values()))
    threads, goals = report.get("threads", "all"), report.get("goals", {})
    all_threads, one = f"{threads} threads", report.get("one_thread", {}).get("ratio", {})
    if threads == 1:
        all_threads, one = "1 thread", report.get("ratio", {})
    rows = []
    for ratio, (said, side) in RATIOS.items():
        for network, ratios in report.get("ratio", {}).items():
            found = {all_threads: ratios.get(ratio), "1 thread": one.get(network, {}).get(ratio)}
            measured = {k: v for k, v in found.items() if isinstance(v, int | float)}
            if all_threads not in measured:
                continue
            goal = goals.get(ratio, {}).get(network)
            rows.append({"ratio": said, "network": network,
                         **{k: f"{measured[k]:.2f}" if k in measured else "-" for k in found},
                         "goal": "-" if goal is None else f"{side} {goal:g}",
                         "reached": "-" if goal is None else _reached(measured, side, goal),
                         "the paper (RTX 3090)": paper if ratio == "dp_ngd_over_dp_sgd" else "-"})
    columns = dict.fromkeys(["ratio", "network", all_threads, "1 thread", "goal", "reached", "the paper (RTX 3090)"])
    table = pd.DataFrame(rows, columns=list(columns))
    missing = "" if goals else "; this report has no goals"
    shown = table if goals else table.drop(columns=["goal", "reached"])
    return shown, "bench_ratios", f"Ratios of one training step, timed in turns (dpngd bench){missing}", table


OF_THE_PAPER = ("resnet-20", "wrn-16-4")


def step_costs(report: dict) -> pd.DataFrame:
    """By network, what a DP-NGD step costs in DP-SGD steps: the numbers of the claim `step-cost-bench`."""
    found = benched(min(paper_step_cost().values()))(report)
    paper = " and ".join(f"{v:.2f}" for v in sorted(paper_step_cost().values()))
    return pd.DataFrame([{"network": p.name, "whose": "the paper's" if p.name in OF_THE_PAPER else "ours",
                          "DP-NGD step, in DP-SGD steps": part_said(p, "", 2), "rounds": p.estimate.n,
                          "the paper (RTX 3090)": paper} for p in found.parts])


def _reached(measured: dict[str, float], side: str, goal: float) -> str:
    """"yes", "no", or with how many threads; numbers count as they are shown."""
    held = [k for k, v in measured.items() if (round(v, 2) <= goal if side == "≤" else round(v, 2) >= goal)]
    return "yes" if len(held) == len(measured) else f"with {held[0]}" if held else "no"


def bench_seconds(report: dict) -> Table:
    """Median seconds per step of every contender."""
    rows = []
    for network, result in report.get("models", {}).items():
        base = result.get("contenders", {}).get("dp-sgd", {}).get("median")
        for name, row in result.get("contenders", {}).items():
            rows.append({"network": network, "batch": result.get("batch", ""), "contender": name,
                         "seconds per step": round(row["median"], 3),
                         "over DP-SGD": round(row["median"] / base, 2) if base else ""})
    table = pd.DataFrame(rows, columns=["network", "batch", "contender", "seconds per step", "over DP-SGD"])
    return table, "bench_seconds", "Seconds per step of every contender, median", table


# ---- Notebook 06: the gate and the grid search -----------------------------------------------------------------------

def gate_table(profile: Profile) -> Table:
    """The settings that the gate tried, in its order, what DP-SGD gains in each, and which one passed."""
    rows, section = [], profile.settings["gate"]
    for data, found in profile.settings["gated"].items():
        low, high = (section["cells"][data][i] for i in (0, -1))
        for tried in found["tried"]:
            passed = {"N": tried["N"], "B": tried["B"]} == found["passed"]
            rows.append({"data": sets.label(data), "N": f"{tried['N']:,}", "B": tried["B"],
                         f"DP-SGD at ε = {low:g}, %": f"{tried['accuracy'][0]:.1f}",
                         f"at ε = {high:g}, %": f"{tried['accuracy'][-1]:.1f}",
                         "gain, points": f"{tried['points']:.1f}",
                         "asked": f"{section['points'][data]:g}", "passed": "**passed**" if passed else "no"})
    table = pd.DataFrame(rows)
    return table, "gate", "The gate: settings tried until ε matters to DP-SGD (validation accuracy)", table


def grid_search(runs: Runs, profile: Profile, name: str = "tuning") -> Table:
    """Every trial in the CSV; shown is each method's best, its number of trials, and where a wider grid might help."""
    kept = profile.kept(name)
    won_by = profile.settings["tuned"].get("methods", {})
    data = pd.DataFrame([{"method": c.method, "data": c.data, "model": c.model, "epsilon": c.epsilon, "seed": c.seed,
                          "eta": c.eta, "T": c.T, **{n: getattr(c, n) for n in OWN},
                          "accuracy": None if r["accuracy"] is None else 100 * r["accuracy"], "status": r["status"],
                          "evaluated_on": r["evaluated_on"]} for c, r in runs.each()])
    rows = []
    for method in runs.methods():
        for d, epsilon in runs.cells():
            if epsilon not in won_by.get(method, {}).get(place(d, kept), {}):
                continue
            first = [*profile.trials(method, d, epsilon, name), *profile.second(method, d, epsilon, name)]
            repeats = profile.repeats(method, d, epsilon, name)
            won = tuning.winner(profile, method, d, epsilon, name)
            best = [c for axes, c in first if axes == won] + [c for axes, cs in repeats if axes == won for c in cs]
            own = {n: getattr(best[0], n) for n in OWN}
            edges = tuning.edges(profile, method, d, epsilon, name)
            rows.append({"method": METHODS[method].label, "data": sets.label(d), "network": best[0].model,
                         "ε": f"{epsilon:g}", "trials": len(first), "repeats": sum(len(cs) for _, cs in repeats),
                         "chosen η": f"{best[0].eta:.3g}", "T": best[0].T,
                         "its own": ", ".join(f"{n}={v:g}" for n, v in own.items() if v is not None) or "none",
                         "validation accuracy": Runs(best, runs.found).mean().text(1),
                         "at the edge of its grid": ", ".join(edges) or "no"})
    model = profile.settings[name]["model"]
    where = f" on {model}" if model else " at an ε between the two" if kept else ""
    trials = {method: sorted({row["trials"] for row in rows if row["method"] == METHODS[method].label})
              for method in runs.methods()}
    whole = {m: counts for m, counts in trials.items() if counts and not METHODS[m].arm_of}
    usual = max((n for counts in whole.values() for n in counts), key=[n for c in whole.values() for n in c].count,
                default=0)
    others = [f"{METHODS[m].label} {' or '.join(map(str, counts))}" for m, counts in whole.items() if counts != [usual]]
    of_arms = sorted({n for m, counts in trials.items() if METHODS[m].arm_of for n in counts})
    said = f"What won the search{where}: {usual} trials for every method"
    said += f", but {'; '.join(others)} (it is also tuned at the steps of Figure 2)" if others else ""
    if of_arms:
        said += f"; {' or '.join(map(str, of_arms))} for an arm of DP-NGD, which has only its rate to find"
    return pd.DataFrame(rows), name, said, data


def finalists(runs: Runs, profile: Profile, name: str = "tuning") -> pd.DataFrame | None:
    """Each setting that was repeated, seed by seed; None where the profile repeats none."""
    section, rows = profile.settings[name], []
    won_by = profile.settings["tuned"].get("methods", {})
    for method in runs.methods():
        for d, epsilon in runs.cells():
            first = [*profile.trials(method, d, epsilon, name), *profile.second(method, d, epsilon, name)]
            chosen = epsilon in won_by.get(method, {}).get(place(d, profile.kept(name)), {})
            for axes, repeats in profile.repeats(method, d, epsilon, name):
                here = Runs([c for a, c in first if a == axes] + repeats, runs.found)
                by_seed = here.by_seed()
                won = chosen and axes == tuning.winner(profile, method, d, epsilon, name)
                rows.append({"method": METHODS[method].label, "data": sets.label(d), "ε": f"{epsilon:g}",
                             "setting": ", ".join(f"{n}={v:g}" for n, v in axes.items()),
                             **{f"seed {s}": f"{by_seed[s]:.1f}" if s in by_seed else "-" for s in here.values("seed")},
                             "mean": f"{here.mean().mean:.2f}", "won": "won" if won else ""})
    return pd.DataFrame(rows) if section["finalists"]["seeds"] and rows else None


# ---- The audit (`dpngd audit --json`, stored in results/) ------------------------------------------------------------

AUDITED = {"sensitivity": "one sample moves a sum by", "noise": "noise", "canary, mu": "canary, 1/σ allowed",
           "accounting": "spends"}


def audit(stored: dict) -> Table:
    """One row per method, from results/audit.json: what was measured in the main tests, and how many of all passed."""
    data = pd.DataFrame(stored["lines"])
    rows = []
    for subject, lines in data.groupby("subject", sort=False):
        measured = {column: _measured(lines, test) for test, column in AUDITED.items()}
        rows.append({"subject": subject, "passed": f"{int(lines['passed'].sum())} of {len(lines)}", **measured,
                     "s": f"{lines['seconds'].sum():.1f}"})
    statistical = int(data["level"].notna().sum())
    caption = (f"Audit: {int((~data['passed']).sum())} of {len(data)} tests failed; {statistical} are statistical, "
               f"false alarm at most {100 * stored['false_alarm']:g}%; {stored['cpu_seconds']:.0f} s of CPU time")
    return pd.DataFrame(rows), "audit", caption, data


def _measured(lines: pd.DataFrame, test: str) -> str:
    """The main number of a test, and its limit where that is a number too; GEP's noise has a line per channel."""
    found = lines[(lines["test"] == test) | lines["test"].str.startswith(f"{test}, channel")]
    said = []
    for line in found.itertuples():
        number = line.measured.split(" (")[0].split(" over ")[0].split(" of ")[0]
        said.append(f"{number}, limit {line.limit.split(' = ')[-1]}" if test.startswith("canary") else number)
    return "; ".join(said)


def self_test(stored: dict) -> Table:
    """One row per planted leak, from results/audit-self-test.json."""
    data = pd.DataFrame(stored["leaks"])
    shown = pd.DataFrame({
        "leak": data["leak"], "size": data["size"], "found by": data["by"].where(data["found"], "MISSED"),
        "control": data["control"].map({True: "clean", False: "FLAGGED"}), "smallest leak seen": data["power"],
        "s": data["seconds"].map("{:.1f}".format)})
    caption = f"Planted leaks: {int(data['passed'].sum())} of {len(data)} found, with their controls clean"
    return shown, "audit_self_test", caption, data
