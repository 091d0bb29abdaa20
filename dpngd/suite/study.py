"""What the notebooks call: a Study asks for the runs of a notebook, computes the missing ones, and keeps what it shows.

    study = Study("01_utility_table", profile)
    study.run()                          # trains only what the store does not have; says what there is
    config, record = study.example(...)  # one run, to look at
    study.table(...), study.figure(...)  # shown, and saved where DPNGD_FIGURES names a folder (run_all.py does)
    study.claim("best-everywhere")       # what one sees, and the verdict
    study.verdicts(), study.learned(), study.provenance()

What was not run is said in a sentence in place of an empty table or figure. Exploring in Jupyter saves nothing, so it
never overwrites the figures of a profile.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from IPython.display import HTML, Image, Markdown, display
from matplotlib.figure import Figure

from dpngd.errors import UsageError, unknown
from dpngd.files import read_json, write_atomically
from dpngd.methods import METHODS
from dpngd.suite import claims, paths, plots, profiles, stats, story, sweep
from dpngd.suite.params import SEARCHES
from dpngd.suite.rules import Theory
from dpngd.suite.runs import Runs
from dpngd.suite.store import Store
from dpngd.training.config import RunConfig

ARTIFACTS: dict[str, tuple[str, ...]] = {
    "00_geometry": (),
    "01_utility_table": ("utility_table", "between", "mean_choice", "whole", "views", "networks"),
    "02_convergence_curves": ("convergence",),
    "03_public_sample_efficiency": ("sample_efficiency", "pretraining", "sources"),
    "04_ablations": ("ablation_decoupling", "ablation_decoupling_equal", "ablation_clipping", "ablation_clipping_equal",
                     "ablation_floor", "ablation_floor_equal", "ablation_ours", "bound", "kl_maps", "releases"),
    "05_wallclock_overhead": ("overhead",),
    "06_hyperparameter_robustness": ("robustness", "gate", "tuning", "tuning_networks", "tuning_between"),
    "07_your_own_data": (),
}
"""The notebooks, and the artifacts of the profile that each shows."""

OWN_STORE = "own-data"  # results/own-data.jsonl
CHOICES = ("methods", "datasets", "epsilons", "seeds")
PARAMETERS = ("profile", *CHOICES, "train", "jobs")


def configs(notebook: str, profile: profiles.Profile, **choices: Any) -> dict[str, list[RunConfig]]:
    """The runs of a notebook by artifact. Gate and tuning are always the profile's: fewer would be no fair search."""
    if notebook not in ARTIFACTS:
        raise unknown("notebook", notebook, ARTIFACTS)
    return {a: profile.configs(a, **({} if a in profiles.FIXED else choices)) for a in ARTIFACTS[notebook]
            if a in profile.artifacts}


def results_stamp(profile: str, store: Store, keys: Iterable[str]) -> str:
    """What a figure or report was drawn from: the profile and its results (`Store.stamp`), never the work tree."""
    return ", ".join(part for part in (f"dpngd, profile {profile}", store.stamp(keys)) if part)


def check_parameters(profile: profiles.Profile, choices: Mapping[str, Any], train: Any, jobs: Any) -> None:
    """A UsageError for parameters that no notebook can mean; all are looked at before any run is asked for."""
    for name, valid in (("methods", METHODS), ("datasets", profile.settings["data"])):
        given = choices[name]
        if given is not None:
            check_list(name, given, str, "names")
            for item in given:
                if item not in valid:
                    raise UsageError(f"{name}: {unknown(name.removesuffix('s'), item, valid)}")
    for name, kind, what in (("epsilons", int | float, "numbers"), ("seeds", int, "whole numbers")):
        if choices[name] is not None:
            check_list(name, choices[name], kind, what)
    if not isinstance(train, bool):
        raise UsageError(f"train = {train!r}: must be True or False")
    if jobs is not None and (isinstance(jobs, bool) or not isinstance(jobs, int) or jobs < 1):
        raise UsageError(f"jobs = {jobs!r}: must be a whole number from 1, or None for the cores")


def check_list(name: str, given: Any, kind: Any, what: str) -> None:
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise UsageError(f"{name} = {given!r}: give a list of {what}, or None for the profile's")
    for item in given:
        if isinstance(item, bool) or not isinstance(item, kind):
            raise UsageError(f"{name} = {given!r}: {item!r} is not one of the {what} that it takes")


def default_jobs() -> int:
    """DPNGD_JOBS where that is set, else the cores."""
    given = os.environ.get("DPNGD_JOBS") or str(os.cpu_count() or 1)
    if not given.isdecimal() or int(given) < 1:
        raise UsageError(f"DPNGD_JOBS is {given!r}: set it to a whole number from 1")
    return int(given)


class Asked(dict[str, Runs]):
    """Artifact -> its runs. One that the profile does not ask for has none, and is not an error."""

    def __missing__(self, artifact: str) -> Runs:
        known = {name for group in ARTIFACTS.values() for name in group}
        if artifact not in known:
            raise unknown("artifact", artifact, known)
        return Runs([], {})


class Study:
    """One notebook under one profile, with the reader's choices (None: the profile's)."""

    def __init__(self, notebook: str, profile: str = "quick", *, methods: Sequence[str] | None = None,
                 datasets: Sequence[str] | None = None, epsilons: Sequence[float] | None = None,
                 seeds: Sequence[int] | None = None, train: bool = True, jobs: int | None = None):
        self.notebook, self.profile, self.train = notebook, profiles.load(profile), train
        self.choices = {"methods": methods, "datasets": datasets, "epsilons": epsilons, "seeds": seeds}
        check_parameters(self.profile, self.choices, train, jobs)
        self.configs = configs(notebook, self.profile, **self.choices)
        self.jobs = jobs or default_jobs()
        self.store = Store(store_of(notebook, self.profile.name))
        self.runs: dict[str, Runs] = Asked()
        self.theory: Theory | None = None
        self._rows: list[dict[str, Any]] | None = None  # decided once for what was run and measured so far
        self.shown: dict[str, list[dict]] = {"figures": [], "tables": [], "absent": []}
        out = os.environ.get("DPNGD_FIGURES")
        self.out = Path(out) if out else None

    def run(self) -> None:
        """Train what is missing (or, with train=False, take what there is); say what was planned, and what exists."""
        wanted = list({c.key(): c for group in self.configs.values() for c in group}.values())
        missing = sum(self.store.get(c) is None for c in wanted)
        self._rows = None
        if self.train and missing:
            sweep.ensure(wanted, store=self.store, jobs=self.jobs, seconds=self.profile.seconds)
        self.runs = Asked({a: Runs.of(group, map(self.store.get, group)) for a, group in self.configs.items()})
        self.describe()

    def describe(self) -> None:
        """The runs by artifact: planned, there, of which methods, in which cells, with which seeds."""
        print(f"profile {self.profile.name}: {self.profile.about}")
        columns = ("artifact", "runs", "of", "methods", "data sets and ε", "seeds")
        rows = [(name, f"{len(runs):,}", f"{len(runs.configs):,}", "; ".join(map(plots.label, runs.methods())),
                 story.labelled(cells_said(runs)), len(runs.values("seed"))) for name, runs in self.runs.items()]
        if rows:
            display(HTML(story.html_table(columns, rows)))

    def example(self, artifact: str, **fields: Any) -> tuple[RunConfig, dict | None]:
        """A run of an artifact with these fields, to look at: a typical one that exists, else one that is planned,
        without a record."""
        asked = self.runs[artifact]
        runs = asked.where(**fields) if asked.where(**fields).configs else asked
        there = [config for config, _ in runs.each()] or runs.configs
        config = self.winner(artifact, there) or typical(there, self.profile.settings["defaults"].get("public_size"))
        return config, self.store.get(config)

    def winner(self, search: str, configs: Sequence[RunConfig]) -> RunConfig | None:
        """Of a search's trials one that won; None where no search is meant, or it has not been decided."""
        if search not in SEARCHES:
            return None
        from dpngd.suite import tuning

        tuned = self.profile.settings["tuned"].get("methods", {})
        for config in configs:
            where = config.method, config.data, config.epsilon, search
            at = tuned.get(config.method, {}).get(profiles.place(config.data, self.profile.kept(search)), {})
            if config.epsilon in at and any(
                    axes == tuning.winner(self.profile, *where) and trial.key() == config.key()
                    for axes, trial in (*self.profile.trials(*where), *self.profile.second(*where))):
                return config
        return None

    def measure(self) -> Theory:
        """What the paper proves, measured (notebook 00)."""
        from dpngd.suite.theory import measure  # late: the other notebooks redraw without torch

        choices = {k: v for k, v in self.choices.items() if k != "seeds"}
        self.theory, self._rows = measure(self.profile, **choices), None
        return self.theory

    def table(self, table: pd.DataFrame | None, name: str, caption: str, data: pd.DataFrame | None = None, *,
              runs: Runs | None = None, keep: bool = True) -> None:
        """Show a table; `data` are the full numbers behind it, saved as CSV. **Text** is bold. `runs` are those that it
        was made from: a sentence stands in its place where none of them exist. `keep` it in the report too."""
        lost = story.missing(runs) if runs is not None else ""
        if table is None or table.empty or (runs is not None and not len(runs)):
            self.leave_out(name, caption, lost or "nothing to show yet")
            return
        caption += f" ({lost})" if lost else ""
        rows = table.astype(str).to_numpy().tolist()
        display(HTML(f"<p><b>{story.bold_html(caption)}</b></p>\n{story.html_table(list(table.columns), rows)}"))
        if not keep:
            return
        if self.out:
            self.out.mkdir(parents=True, exist_ok=True)
            write_atomically(self.out / f"table_{name}.csv", (table if data is None else data).to_csv(index=False))
        self.shown["tables"].append({"name": name, "caption": caption, "columns": list(table.columns), "rows": rows,
                                     "csv": f"table_{name}.csv"})  # a figure of the same name has its own

    def figure(self, figure: Figure, name: str, caption: str, *, runs: Runs | None = None, keep: bool = True) -> None:
        """Show a figure with its stamp, and keep it as PNG, SVG and CSV; a sentence in its place where it has no number
        of ours yet."""
        lost = story.missing(runs) if runs is not None else ""
        if plots.is_empty(figure):
            self.leave_out(name, caption, lost.replace("preliminary", "nothing to show yet") or "not run")
            return
        caption += f" ({lost})" if lost else ""
        plots.stamp(figure, self.stamp())
        picture = plots.png(figure)
        display(Image(picture, alt=caption))
        if not keep:
            return
        if self.out:
            plots.save(figure, self.out, name, picture)
        self.shown["figures"].append({"name": name, "caption": caption, **{k: f"{name}.{k}" for k in plots.FILES}})

    def say(self, text: str) -> None:
        """A paragraph made from numbers."""
        display(Markdown(text))

    def leave_out(self, name: str, caption: str, why: str) -> None:
        """Say why a table or figure is not there."""
        display(Markdown(f"*{caption}: {why}.*"))
        self.shown["absent"].append({"name": name, "caption": caption, "why": why})

    def stamp(self) -> str:
        """What is drawn so far comes from these results."""
        keys = (record["key"] for runs in self.runs.values() for record in runs.records)
        return results_stamp(self.profile.name, self.store, keys)

    def decided(self) -> list[dict[str, Any]]:
        """The rows of this notebook's claims."""
        if self._rows is not None:
            return self._rows
        sources: dict[str, Any] = dict(self.runs)
        if self.theory is not None:
            sources["theory"] = self.theory
        if (report := bench_report()) is not None:
            sources["bench"] = report
        demonstration = self.profile.name in claims.DEMONSTRATIONS
        gated = self.profile.settings["gated"]
        self._rows = [claims.decide(claim, sources, demonstration=demonstration, gated=gated)
                      for claim in claims.of_notebook(self.notebook)]
        return self._rows

    def row(self, claim: str) -> dict[str, Any]:
        """The row of one claim of this notebook."""
        rows = {row["id"]: row for row in self.decided()}
        if claim not in rows:
            raise unknown("claim", claim, rows)
        return rows[claim]

    def claim(self, *ids: str) -> None:
        """Claims with what one sees in their figures, and their verdicts."""
        for name in ids:
            display(HTML(story.claim(self.row(name))))

    def verdicts(self) -> None:
        """Paper against ours, all claims of the notebook in one table: the paper's first, then our questions."""
        rows = sorted(self.decided(), key=lambda r: bool(r["question"]))
        cells = [(r["sentence"], story.labelled(r["paper"]) or "not in the paper", story.labelled(r["brief"]),
                  claims.seeds_text(r), story.badge(r)) for r in rows]
        display(HTML(story.html_table(("claim", "paper", "ours, 95% interval", "n", "verdict"), cells, raw=(4,))))

    def learned(self) -> None:
        """What this notebook decided, from its rows."""
        display(Markdown("\n".join(f"- {said}" for said in story.learned(self.decided()))))

    def check(self) -> None:
        """The words, which nbval compares. A demonstration has none: there it says whether what must hold on every
        machine does (privacy, theorems, counts)."""
        for claim, row in zip(claims.of_notebook(self.notebook), self.decided(), strict=True):
            held = claim.steady and row["word"] == stats.DEMONSTRATION
            print(f"{row['id']}: {('holds' if row['holds'] else 'does not hold') if held else row['word']}")

    def provenance(self) -> None:
        """Where the numbers come from; also the notebook's entry for the report."""
        records = {r["key"]: r for runs in self.runs.values() for r in runs.records}.values()
        seconds = sum(r["seconds"]["total"] for r in records)
        bench = "; results/bench.json" if any(c.source == "bench" for c in claims.of_notebook(self.notebook)) and \
            bench_report() is not None else ""
        print(f"{self.stamp()}; " + (f"{len(records)} runs, {seconds / 60:.1f} minutes of one core" if records else
                                     "no stored run is shown") + bench)
        if self.out:
            entry = {"notebook": self.notebook, "profile": self.profile.name, "claims": self.decided(), **self.shown,
                     "compute": {"runs": len(records), "seconds": round(seconds, 1),
                                 "keys": sorted(r["key"] for r in records),
                                 "hardware": sorted({hardware(r["where"]) for r in records})}, "stamp": self.stamp()}
            write_atomically(self.out / f"{self.notebook}.json", json.dumps(entry, indent=1, ensure_ascii=False) + "\n")


def typical(configs: Sequence[RunConfig], public_size: int | None, most: int = 400) -> RunConfig:
    """The first with the most steps up to `most`, and with the usual number of public images where one has it."""
    usual = [c for c in configs if c.public_size == public_size] or list(configs)
    return max(usual, key=lambda c: c.T if most >= c.T else -c.T)


def store_of(notebook: str, profile: str) -> str:
    """The store of a notebook's runs: its profile's. Notebook 07 has runs of its own, the same under every profile."""
    return OWN_STORE if notebook == "07_your_own_data" else profile


def cells_said(runs: Runs) -> str:
    """cifar10: 1, 2, 4; svhn: 1."""
    cells: dict[str, list[float]] = {}
    for data, epsilon in runs.cells():
        cells.setdefault(data, []).append(epsilon)
    return "; ".join(f"{data}: {', '.join(f'{e:g}' for e in epsilons)}" for data, epsilons in cells.items())


def hardware(where: Mapping[str, Any]) -> str:
    device = where.get("device", "cpu")
    return where.get("cpu", "unknown") if device == "cpu" else device


def bench_report() -> dict[str, Any] | None:
    """What `dpngd bench --json > results/bench.json` left; None where that was not run."""
    return read_json(paths.BENCH, "write it again, or `git checkout` it") if paths.BENCH.exists() else None


def bench_table() -> pd.DataFrame | None:
    """That report as a table: each ratio beside its goal and the paper's."""
    from dpngd.suite import tables

    report = bench_report()
    return None if report is None else tables.bench_ratios(report)[0]


def step_cost_table() -> pd.DataFrame | None:
    """Of that report, what a DP-NGD step costs by network, as the claim has it."""
    from dpngd.suite import tables

    report = bench_report()
    return None if report is None else tables.step_costs(report)
