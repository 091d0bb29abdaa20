"""Write the pages of docs/ that are made from data: `make docs`.

| page | made from |
| --- | --- |
| docs/deviations.md | params/deviations.yaml, params/published.yaml |
| docs/speed.md, between the two marks | results/bench.json |

The report shows the same rows. A test compares the committed page with what this module makes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dpngd.files import write_atomically
from dpngd.suite import paths
from dpngd.suite.params import deviations, published
from dpngd.suite.study import bench_report, goals_table


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


BEGIN, END = "<!-- made from results/bench.json by `make docs`: do not edit -->", "<!-- end of what is made -->"


def speed_page() -> str:
    """docs/speed.md with its measured part made anew."""
    text = (paths.ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{measured(bench_report())}\n{END}{after}"


def measured(report: Mapping[str, Any] | None) -> str:
    """What `dpngd bench --full` found, as Markdown: ratios and goals, growth, what is done once, programs of Opacus."""
    if report is None or "goals" not in report:
        return "Not measured yet with the present code on a quiet machine: results/bench.json has no goals in it.\n"
    load = f"load {report['load']:.1f} before and {report['load_after']:.1f} after"
    lines = [f"{report['cpu']}, {report['cores']} cores, torch {report['torch']}, {report['clock']} clock, {load}; "
             f"{report['repeats']} rounds, K = {report['K']}.", "", *rows_of(goals_table(report))]
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


PAGES: dict[str, Callable[[], str]] = {"deviations.md": deviations_page, "speed.md": speed_page}


def main() -> int:
    for name, page in PAGES.items():
        write_atomically(paths.ROOT / "docs" / name, page())
        print(f"docs/{name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
