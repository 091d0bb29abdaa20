"""Write the pages that are made from data: `make docs`.

| page | made from |
| --- | --- |
| docs/deviations.md | params/deviations.yaml, params/published.yaml |
| docs/claims.md | figures/cpu/claims.json |
| README.md, between its markers | figures/cpu/claims.json, results/cpu.jsonl, and what params/ plans |
| docs/speed.md, between its markers | results/bench.json |

Such a part lies between `<!-- NAME: written by make docs -->` and `<!-- end of NAME -->`. The report shows the
same rows. A test compares the committed pages with what this module makes.
"""

from __future__ import annotations

import collections
import functools
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from dpngd.errors import UsageError
from dpngd.files import write_atomically
from dpngd.suite import paths, profiles, report, stats, story
from dpngd.suite.params import deviations, published
from dpngd.suite.store import Store
from dpngd.suite.study import ARTIFACTS, bench_report, configs
from dpngd.suite.tables import bench_ratios

SHIPPED = "cpu"  # the profile of the shipped results
ASKS = {
    "00_geometry": ("Theorem 1, sections 3.2, 3.3", "Is the update what the paper proves?"),
    "01_utility_table": ("Table 2", "Is DP-NGD more accurate at every ε?"),
    "02_convergence_curves": ("Figure 2", "Does it need fewer steps?"),
    "03_public_sample_efficiency": ("Figure 3", "Does it depend on the public images?"),
    "04_ablations": ("Tables 3, 4, Figure 4", "Which of its parts matter?"),
    "05_wallclock_overhead": ("Table 5", "What does a step cost?"),
    "06_hyperparameter_robustness": ("Table 6", "What has to be tuned?"),
    "07_your_own_data": ("beyond the paper", "Your own data, with nothing to tune"),
}
"""What of the paper a notebook shows, and its question."""


PICTURES = {
    True: ("lead", "Lead of DP-NGD over the best baseline in every cell, in points of accuracy, beside the paper's"),
    False: ("theorem", "Theorem 1, measured. Left: the noise of an update follows the inverse of the clamped "
                       "curvature. Middle: the step of one sample, in KL divergence, against the radius that clipping "
                       "sets. Right: below lambda_safe a step may be longer than DP-SGD's bound"),
}
"""The README's picture and its caption, by whether a data set of Table 2 is complete."""


def deviations_page() -> str:
    """docs/deviations.md: the deviations by topic, and where the paper says two things."""
    rows = deviations()
    lines = ["# Deviations from the paper, and what it leaves open", "",
             "Written by `make docs` from params/deviations.yaml and params/published.yaml: do not edit. The report "
             "shows the same list.", ""]
    for topic in dict.fromkeys(row["topic"] for row in rows):
        lines += [f"## {topic}", "", "| open or different | taken here | why | switch |", "| --- | --- | --- | --- |"]
        lines += [table_row(row["open"], row["take"], row["why"], row.get("switch", ""))
                  for row in rows if row["topic"] == topic]
        lines.append("")
    lines += ["## Where the paper says two things", "", "| what | versions |", "| --- | --- |"]
    lines += [table_row(row["what"], "; ".join(f"{v['value']} ({v['place']})" for v in row["versions"]))
              for row in published()["inconsistencies"]]
    return "\n".join(lines) + "\n"


def table_row(*cells: str) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


# ---- The README's parts ----------------------------------------------------------------------------------------------

def found_part() -> str:
    """What was found: how far the evidence is, three sentences, and one picture."""
    data = report.current(SHIPPED)
    rows = data["claims"]
    papers = [row for row in rows if not row["question"]]
    lines = []
    if any(row["word"] == stats.NOT_RUN for row in rows):
        lines += [f"{how_far(data.get('compute', {}))} A claim is decided when all of its runs exist.", ""]
    proved = [row for row in papers if row["notebook"] == "00_geometry"]
    lines += [f"The paper's {len(papers)} claims: **{story.words_counted(papers)}**. Of these, {len(proved)} are what "
              f"it proves, measured on a network ({story.words_counted(proved)}). The main ones:", ""]
    lines += [f"- {sentence}" for sentence in story.found(rows)]
    if said := story.refuted(rows):
        lines += ["", said]
    name, caption = PICTURES[table_2_shown(rows)]
    if table_2_shown(rows) and not table_2_decided(rows):
        caption += ". Preliminary: " + story.missing_of(next(r for r in rows if r["id"] == "best-everywhere"))
    picture = paths.FIGURES / SHIPPED / f"{name}.png"
    if picture.exists():
        file = picture.relative_to(paths.ROOT).as_posix()
        lines += ["", f"![{caption.partition('. ')[0]}]({file})", "", f"*{caption}.*"]
    return "\n".join(lines)


def table_2_decided(rows: list[dict[str, Any]]) -> bool:
    """Whether the paper's main claim, that of Table 2, has its verdict."""
    return next(row for row in rows if row["id"] == "best-everywhere")["word"] != stats.NOT_RUN


def table_2_shown(rows: list[dict[str, Any]]) -> bool:
    """Whether every cell of a data set of Table 2 has all of its seeds."""
    row = next(row for row in rows if row["id"] == "best-everywhere")
    by_data: dict[str, list[int]] = {}
    for part in row["parts"]:
        by_data.setdefault(part["name"].split(" ")[0], []).append(part["n"])
    most = max((n for found in by_data.values() for n in found), default=0)
    return most > 0 and any(min(found) == most for found in by_data.values())


def how_far(compute: Mapping[str, Any]) -> str:
    """How much of the evidence is there. Until a run on a test set exists, the number of planned runs is not told: the
    plan of the search still has the rates that it starts with, and counts none of the trials that followed."""
    on = collections.Counter(record["evaluated_on"] for record in Store(SHIPPED).shipped.values())
    if not on:
        return "**The evidence is still being computed.** No run is shipped yet."
    if not on["test"]:
        return (f"**The evidence is still being computed.** {sum(on.values()):,} runs are shipped, all of them of the "
                "gate and the search, on validation images; none on a test set yet.")
    there, planned = (compute.get("tests", {}).get(name, 0) for name in ("there", "planned"))
    return (f"**The evidence is still being computed: {there:,} of {planned:,} planned runs on test sets are there**, "
            f"and {sum(on.values()) - on['test']:,} runs of the gate and the search, on validation images.")


def notebooks_part() -> str:
    """Which notebook to open first; one row per notebook: artifact, question, verdicts on the paper's claims, time."""
    rows = report.current(SHIPPED)["claims"]
    first = "01" if table_2_decided(rows) else "00"
    lines = ["They open on the shipped results, in seconds and without data; their outputs are in the files. "
             f"Open {first} first.", "",
             "| notebook | of the paper | the question | the paper's claims | to train, `quick` | to train, `cpu` |",
             "| --- | --- | --- | --- | --- | --- |"]
    for notebook, (artifact, question) in ASKS.items():
        papers = [row for row in rows if row["notebook"] == notebook and not row["question"]]
        minutes = [trained_in(notebook, p) for p in ("quick", SHIPPED)]
        lines.append(table_row(f"[{notebook[:2]}](notebooks/{notebook}.ipynb)", artifact, question,
                               story.words_counted(papers) or "none of the paper's", *minutes))
    return "\n".join(lines)


def trained_in(notebook: str, profile: str) -> str:
    """What the runs of a notebook take on one core; the runs of an earlier notebook are not counted again."""
    if not ARTIFACTS[notebook]:
        return "-"
    minutes = minutes_of(notebook, profile)
    if not minutes:
        return "none of its own"
    return f"{max(1, minutes):,.0f} min" if minutes < 100 else f"{minutes / 60:,.1f} h"


@functools.cache
def minutes_of(notebook: str, profile: str) -> float:
    """Minutes of one core that the runs of a notebook take which no notebook before it has, as estimated."""
    settings = profiles.load(profile)

    def runs(name: str) -> dict[str, Any]:
        return {c.key(): c for group in configs(name, settings).values() for c in group}

    before = {key for name in ARTIFACTS if name < notebook for key in runs(name)}
    return sum(settings.seconds(c) for key, c in runs(notebook).items() if key not in before) / 60


# ---- docs/speed.md: its measured part --------------------------------------------------------------------------------

MEASURES = (
    ("dp_sgd_over_plain", "a step of DP-SGD takes {} times a step without privacy"),
    ("dp_ngd_over_dp_sgd", "a step of DP-NGD {} times a step of DP-SGD, its share of a refresh included"),
    ("opacus_over_dp_sgd", "the fastest mode of Opacus {} times our DP-SGD"),
    ("dp_ngd_memory_over_opacus", "DP-NGD needs {} of the peak memory of Opacus"),
)
MEMORY = ("plain", "opacus-hooks", "dp-sgd", "dp-ngd")


def short_part(report: Mapping[str, Any] | None) -> str:
    """The page in three sentences: each ratio as a range over the networks, programs of Opacus, goals by outcome."""
    if report is None or "goals" not in report:
        return "Not measured yet with the present code on a quiet machine."
    said = []
    for key, sentence in MEASURES:
        found = [ratios[key] for ratios in report["ratio"].values() if key in ratios]
        if found:
            said.append(sentence.format(" to ".join(dict.fromkeys(f"{n:.2f}" for n in (min(found), max(found))))))
    lines = [f"In short, with {report['threads']} threads on {report['cores']} cores ({', '.join(report['ratio'])}): "
             f"{'; '.join(said)}."]
    if "opacus" in report:
        over = ", ".join(f"{row['over_dp_sgd']['dpngd']:.2f}" for row in report["opacus"].values())
        lines.append(f"In whole programs through Opacus ({', '.join(report['opacus'])}) a step of DPNGD takes {over} "
                     "times Opacus's DP-SGD.")
    reached = collections.Counter(bench_ratios(report)[0]["reached"])
    partly = sum(n for outcome, n in reached.items() if outcome.startswith("with"))
    lines.append(f"Of the {reached.total() - reached['-']} goals that were set for these ratios, {reached['yes']} are "
                 f"reached, {partly} with one number of threads only, and {reached['no']} are missed.")
    return textwrap.fill(" ".join(lines), 128, break_on_hyphens=False)


def memory_rows(report: Mapping[str, Any]) -> list[str]:
    """Peak memory that a step adds, MiB, by contender and network; empty where it was not measured."""
    found = {name: {network: model["contenders"].get(name, {}).get("peak_mib")
                    for network, model in report["models"].items()} for name in MEMORY}
    rows = [table_row(name, *("-" if n is None else f"{n:,.0f}" for n in by.values()))
            for name, by in found.items() if any(n is not None for n in by.values())]
    networks = list(report["models"])
    return ["", "Peak memory that a step adds, in MiB:", "", table_row("contender", *networks),
            table_row(*["---"] * (len(networks) + 1)), *rows] if rows else []


def measured_part(report: Mapping[str, Any] | None) -> str:
    """What `dpngd bench --full` found, as Markdown: ratios and goals, memory, growth, what is done once, programs of
    Opacus."""
    if report is None or "goals" not in report:
        return "Not measured yet with the present code on a quiet machine: results/bench.json has no goals in it.\n"
    load = f"load {report['load']:.1f} before and {report['load_after']:.1f} after"
    lines = [f"{report['cpu']}, {report['cores']} cores, torch {report['torch']}, {report['clock']} clock, {load}; "
             f"{report['repeats']} rounds, K = {report['K']}.", "", *rows_of(bench_ratios(report)[0]),
             *memory_rows(report)]
    if "scaling" in report:
        lines += ["", "How the cost of DP-NGD grows:", "", "| varied | values | ms | exponent |",
                  "| --- | --- | --- | --- |"]
        lines += [table_row(what, ", ".join(map(str, row["values"])),
                            ", ".join(f"{1e3 * s:.1f}" for s in row["seconds"]), f"{row['exponent']:.2f}")
                  for what, row in report["scaling"].items()]
    if "once" in report:
        once = report["once"]
        pace = ", ".join(f"{layout} {n:.0f}" for layout, n in once["pace"].items())
        lines += ["", f"Sigma is calibrated in {once['calibrate']:.1f} s, and `dpngd train --T 1` takes "
                      f"{once['start']:.1f} s. Samples per second of DP-NGD, processes x threads: {pace}.", "",
                  "| method of the `cpu` profile | whole runs per hour |", "| --- | --- |"]
        lines += [table_row(name, f"{n:.0f}") for name, n in once["runs_per_hour"].items()]
    if "opacus" in report:
        lines += ["", "Whole programs through Opacus, one thread:", "",
                  "| program | loop | ms per step | over Opacus's DP-SGD |", "| --- | --- | --- | --- |"]
        lines += [table_row(name, loop, f"{ms:.1f}", f"{row['over_dp_sgd'].get(loop, 1.0):.2f}")
                  for name, row in report["opacus"].items() for loop, ms in row["ms_per_step"].items()]
    return "\n".join(lines) + "\n"


def rows_of(table: Any) -> list[str]:
    """A data frame as the lines of a Markdown table."""
    return [table_row(*table.columns), table_row(*["---"] * len(table.columns)),
            *(table_row(*row) for row in table.itertuples(index=False))]


MADE: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"found": found_part, "notebooks": notebooks_part},
    "docs/speed.md": {"short": lambda: short_part(bench_report()),
                      "measured": lambda: measured_part(bench_report()).strip()},
}
"""The parts of a page that are made, by page and name."""


def with_parts(page: str, text: str) -> str:
    """The text of a page with each of its parts as it would be made now."""
    for name, part in MADE[page].items():
        start, end = f"<!-- {name}: written by make docs -->", f"<!-- end of {name} -->"
        if text.count(start) != 1 or text.count(end) != 1:
            raise UsageError(f"{page} needs one line {start!r} and one {end!r}: make docs writes between them")
        made = part()
        before, _, rest = text.partition(start)
        text = f"{before}{start}\n\n{made}\n\n{end}{rest.partition(end)[2]}"
    return text


def made_anew(page: str) -> str:
    """A page whose parts are made, as it should be now."""
    return with_parts(page, (paths.ROOT / page).read_text(encoding="utf-8"))


PAGES: dict[str, Callable[[], str]] = {
    "docs/deviations.md": deviations_page, "docs/claims.md": lambda: report.docs(SHIPPED),
    **{page: functools.partial(made_anew, page) for page in MADE}}


def main() -> int:
    for name, page in PAGES.items():
        write_atomically(paths.ROOT / name, page())
        print(name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
