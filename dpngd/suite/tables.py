"""Tables behind the figures: one row per point, with mean, interval and n, the paper's number beside it."""

from __future__ import annotations

import math

import pandas as pd

from dpngd.methods import METHODS
from dpngd.suite import tuning
from dpngd.suite.params import published
from dpngd.suite.profiles import Profile, place
from dpngd.suite.rules import Theory, side_by_side, steps_to_peak
from dpngd.suite.runs import NOT_STEPS, Runs, seconds_per_step, step_phases

Table = tuple[pd.DataFrame, str, str, pd.DataFrame]
"""What `Study.table` takes: the table that is shown, its name, its caption, all numbers."""
OWN = ("lambda_safe", "pt_steps", "adadps_e", "C0", "C1")  # parameters that a method has for itself


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
    return pd.DataFrame(rows)


def _combinations(runs: Runs, axes: tuple[str, ...]) -> list[dict]:
    seen = dict.fromkeys(tuple(getattr(c, a) for a in axes) for c in runs.configs)
    return [dict(zip(axes, values, strict=True)) for values in seen]


def shown(table: pd.DataFrame, *axes: str) -> pd.DataFrame:
    """For people: mean ± half the interval, n, and the paper's number."""
    def ours(row: pd.Series) -> str:
        if not row["n"]:
            return "diverged" if row["diverged"] else "not run"
        half = (row["high"] - row["low"]) / 2
        spread = f" ± {half:.1f}" if math.isfinite(half) else ""
        bad = f", {row['diverged']} diverged" if row["diverged"] else ""
        return f"{row['accuracy']:.1f}{spread} (n={row['n']}{bad})"

    out = table[["method", "data", "epsilon", *axes]].copy()
    out["accuracy, 95% interval"] = table.apply(ours, axis=1)
    if table["paper"].notna().any():
        out["paper"] = table["paper"].map(lambda v: "" if v is None or pd.isna(v) else f"{v:.2f}")
    return out.rename(columns={"epsilon": "ε", "public_size": "public images", "public": "public set"})


# ---- Notebook 00: privacy and the clamping schedule ------------------------------------------------------------------

def privacy(theory: Theory) -> Table:
    """sigma for every cell and method, and what it spends."""
    data = pd.DataFrame(theory.budget)
    shown = pd.DataFrame({
        "method": data["method"].map(lambda m: METHODS[m].label), "data": data["data"],
        "ε": data["epsilon"].map("{:g}".format), "δ": data["delta"].map("{:g}".format),
        "q = B/N": data["q"].map("{:.4f}".format), "T": data["T"], "σ": data["sigma"].map("{:.3f}".format),
        "spent, PRV": data["spent"].map("{:.3f}".format), "spent, RDP": data["spent_rdp"].map("{:.3f}".format)})
    return shown, "privacy", "Noise multiplier of every cell: the same for all methods", data


def cost() -> Table:
    """The paper's Table 1."""
    table = published()["privacy_table"]
    data = pd.DataFrame(table["rows"], columns=table["header"])
    return data, "privacy_cost", f"What the paper says is equal and what is not ({table['place']})", data


def schedule_of(profile: Profile) -> dict[str, float]:
    """The clamping schedule of the first cell of the profile's Table 2."""
    config = next(c for c in profile.configs("utility_table", methods=["dp-ngd"]))
    return {"lambda_safe": config.lambda_safe, "lambda_base": config.lambda_base, "T": config.T, "T1": config.T1,
            "p": config.p}


# ---- Notebook 02: the noise of each step budget ----------------------------------------------------------------------

def sigmas(runs: Runs) -> Table:
    """The noise of every step budget, as the runs recorded it."""
    rows = {}
    for config, record in runs.each():
        p = record["privacy"]
        rows.setdefault((config.data, config.epsilon, config.T), {
            "data": config.data, "ε": f"{config.epsilon:g}", "T": config.T, "σ": round(p["sigma"], 3),
            "spent, PRV": round(p["epsilon_prv"], 3), "spent, RDP": round(p["epsilon_rdp"], 3)})
    table = pd.DataFrame([rows[k] for k in sorted(rows)], columns=["data", "ε", "T", "σ", "spent, PRV", "spent, RDP"])
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
    """Table 5: steps and seconds to DP-SGD-PT's peak, the mean over seeds, ours and the paper's."""
    rows = []
    for data, epsilon in runs.cells():
        here = runs.where(data=data, epsilon=epsilon)
        budgets = dict(zip(("dp-sgd-pt", "dp-ngd"), steps_to_peak(here, ["dp-sgd-pt"]), strict=True))
        for method, steps in budgets.items():
            records = side_by_side(here).where(method=method).records
            if steps and records:
                step = sum(map(seconds_per_step, records)) / len(records)
                mean = sum(steps.values()) / len(steps)
                rows.append({"where": "ours, CPU core", "data": data, "ε": f"{epsilon:g}",
                             "method": METHODS[method].label, "seconds per step": round(step, 3),
                             "steps to the peak": round(mean, 1), "total": f"{mean * step:.1f} s", "n": len(steps)})
    for data, epsilon, method, step, steps, hours in published()["overhead"]["rows"]:
        rows.append({"where": "paper, RTX 3090", "data": data, "ε": f"{epsilon:g}", "method": METHODS[method].label,
                     "seconds per step": step, "steps to the peak": steps, "total": f"{hours:g} h", "n": ""})
    table = pd.DataFrame(rows)
    return table, "time_to_peak", "Time to DP-SGD-PT's best accuracy (Table 5)", table


# ---- Notebook 06: the grid search ------------------------------------------------------------------------------------

def grid_search(runs: Runs, profile: Profile, name: str = "tuning") -> Table:
    """Every trial in the CSV; shown is each method's best, its number of trials, and where a wider grid might help."""
    searched = profile.settings[name]["model"]
    data = pd.DataFrame([{"method": c.method, "data": c.data, "model": c.model, "epsilon": c.epsilon, "seed": c.seed,
                          "eta": c.eta, "T": c.T, **{n: getattr(c, n) for n in OWN},
                          "accuracy": None if r["accuracy"] is None else 100 * r["accuracy"], "status": r["status"],
                          "evaluated_on": r["evaluated_on"]} for c, r in runs.each()])
    rows = []
    for method in runs.methods():
        for d, epsilon in runs.cells():
            won = profile.settings["tuned"].get(method, {}).get(place(d, searched))
            if won is None:
                continue
            first = profile.trials(method, d, epsilon, profile.settings[name]["seeds"][0], name)
            repeats = profile.repeats(method, d, epsilon, name)
            best = [c for axes, c in first if axes == won] + [c for axes, cs in repeats if axes == won for c in cs]
            own = {n: getattr(best[0], n) for n in OWN}
            edges = tuning.edges(profile, method, place(d, searched))
            rows.append({"method": METHODS[method].label, "data": d, "network": best[0].model, "ε": f"{epsilon:g}",
                         "trials": len(first), "repeats": sum(len(cs) for _, cs in repeats),
                         "best η": f"{best[0].eta:g}", "T": best[0].T,
                         "its own": ", ".join(f"{n}={v:g}" for n, v in own.items() if v is not None) or "none",
                         "validation accuracy": Runs(best, runs.found).mean().text(1),
                         "at the edge of its grid": ", ".join(edges) or "no"})
    return pd.DataFrame(rows), name, "The grid search: the same number of trials for every method", data


def finalists(runs: Runs, profile: Profile, name: str = "tuning") -> pd.DataFrame | None:
    """Each setting that was repeated, seed by seed; None where the profile repeats none."""
    section, rows = profile.settings[name], []
    for method in runs.methods():
        for d, epsilon in runs.cells():
            first = profile.trials(method, d, epsilon, section["seeds"][0], name)
            for axes, repeats in profile.repeats(method, d, epsilon, name):
                here = Runs([c for a, c in first if a == axes] + repeats, runs.found)
                by_seed = here.by_seed()
                won = axes == profile.settings["tuned"].get(method, {}).get(place(d, section["model"]))
                rows.append({"method": METHODS[method].label, "data": d,
                             "setting": ", ".join(f"{n}={v:g}" for n, v in axes.items()),
                             **{f"seed {s}": f"{by_seed[s]:.1f}" if s in by_seed else "-" for s in here.values("seed")},
                             "mean": f"{here.mean().mean:.2f}", "won": "won" if won else ""})
    return pd.DataFrame(rows) if any(section["repeat"]["seeds"]) and rows else None
