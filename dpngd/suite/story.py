"""What notebooks, README and report say about the numbers: sentences that are made from claims and runs, never typed.

| function | says |
| --- | --- |
| missing | how many planned runs do not exist |
| seen | what one sees in a claim's figure: how many comparisons point which way, smallest and largest estimate |
| learned | what a notebook decided, question by question |
| found | three sentences for the README |

A sentence follows from a row of claims.json (`claims.decide`) alone. While planned runs are missing it says so, and a
demonstration (`quick`) gets numbers and no verdict.
"""

from __future__ import annotations

import functools
import html
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dpngd.data import sets
from dpngd.methods import METHODS, baselines
from dpngd.suite import claims, rules, stats
from dpngd.suite.runs import Runs

Row = Mapping[str, Any]  # of claims.json
SHOWS = {stats.REPRODUCED: ("shows it", "show it"), stats.REFUTED: ("shows the opposite", "show the opposite"),
          stats.EQUIVALENT: ("shows no difference", "show no difference"),
          stats.INCONCLUSIVE: ("leaves it open", "leave it open"),
          stats.NOT_TESTABLE: ("cannot be tested here", "cannot be tested here")}
"""What a comparison does for its claim, by its word: of one, and of several."""


@functools.cache
def _names() -> tuple[re.Pattern, dict[str, str]]:
    known = {m: spec.label for m, spec in METHODS.items()}
    known |= {name: entry.label for name, entry in sets.SETS.items() if entry.private}
    longest = sorted(known, key=len, reverse=True)
    return re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, longest))})(?![\w-])"), known


def labelled(text: str) -> str:
    """Methods and data sets by the names that tables and figures have for them."""
    pattern, known = _names()
    return pattern.sub(lambda found: known[found[1]], text)


def missing(runs: Runs) -> str:
    """Which of the planned runs are not there; empty where all are."""
    planned, there = len(runs.configs), len(runs)
    if not planned:
        return "it waits for a search, or is not planned"
    if there == planned:
        return ""
    return f"{'preliminary' if there else 'not run'}: {planned - there:,} of {planned:,} runs are missing"


def missing_of(row: Row) -> str:
    """The same of a claim."""
    return f"{row['planned'] - row['runs']:,} of {row['planned']:,} runs are missing"


def amount(value: float, unit: str) -> str:
    if unit == rules.AS_FAST and 0 < value < 1:
        return f"{1 / value:.2f} times as long"
    return f"{value:+.2f}{unit}" if "points" in unit else f"{value:.{3 if 'nats' in unit else 2}f}{unit}"


def seen(row: Row) -> str:
    """What one sees in the figure or table of a claim."""
    if row["word"] == stats.NOT_RUN:
        if row["runs"] == row["planned"]:  # none, or none of those that the rule needs
            return "Nothing yet: it waits for a search, or is not planned."
        lost = missing_of(row)
        return f"Nothing yet: {lost}." if not row["runs"] else \
            f"{lost}: what is drawn so far is preliminary and decides nothing."
    parts = [p for p in row["parts"] if p["estimate"] is not None]
    if len(parts) < 2:
        return sentence(labelled(row["brief"]))
    cells = list(parts_by_cell(row).values())
    least, most = (f(cells, key=lambda p: p["estimate"]) for f in (min, max))
    span = f"{amount(least['estimate'], row['unit'])} ({labelled(least['name'])}) to " \
           f"{amount(most['estimate'], row['unit'])} ({labelled(most['name'])})"
    if row["word"] == stats.DEMONSTRATION:
        return f"{len(parts)} comparisons, from {span}. A demonstration: it decides nothing."
    words = [p["word"] for p in row["parts"]]
    best = "estimates" if len(cells) == len(parts) else f"estimates{rules.OVER_BEST}"
    said = [f"{n} {SHOWS[word][n > 1]}" for word in SHOWS if (n := words.count(word))]
    return f"Of {len(row['parts'])} comparisons, each by itself, {listed(said)}; {best} run from {span}."


def listed(items: Sequence[str]) -> str:
    """a, b and c."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def sentence(text: str) -> str:
    text = text.strip()
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def words_counted(rows: Iterable[Row]) -> str:
    """3 reproduced, 1 not run."""
    words = [row["word"] for row in rows]
    return ", ".join(f"{words.count(w)} {w}" for w in (*stats.WORDS, stats.DEMONSTRATION) if w in words)


def learned(rows: Sequence[Row]) -> list[str]:
    """What a notebook decided: a sentence with the counts, then one per claim that was decided."""
    said = []
    for whose, part in (("The paper's", [r for r in rows if not r["question"]]),
                        ("Our own", [r for r in rows if r["question"]])):
        if part:
            what = ("claim" if whose == "The paper's" else "question") + ("s" if len(part) > 1 else "")
            said.append(f"{whose} {len(part)} {what}: {words_counted(part)}.")
    decided = [r for r in rows if r["word"] not in (stats.NOT_RUN, stats.DEMONSTRATION)]
    said += [f"“{r['sentence']}” {claims.HELD[r['word']]}: {labelled(held_brief(r)).rstrip('.')}." for r in decided]
    if not decided:
        said.append("So nothing is learned yet: no claim of this notebook has all of its runs."
                    if all(r["word"] == stats.NOT_RUN for r in rows) else
                    "A demonstration shows the suite at work; it decides no claim.")
    return said


def held_brief(row: Row) -> str:
    """`brief`, without "all 4 hold" after a word that says so."""
    return claims.without_tally(row["brief"]) if row["word"] == stats.REPRODUCED else row["brief"]


# ---- The README ------------------------------------------------------------------------------------------------------

def found(rows: Sequence[Row]) -> list[str]:
    """Three sentences with their numbers: accuracy, speed, and what is left when nothing is tuned."""
    by = {row["id"]: row for row in rows}

    def told(about: str, row: Row) -> str:
        if row["word"] == stats.NOT_RUN:
            there = f"not run yet ({row['runs']:,} of {row['planned']:,} runs)"
            return f"{about}: {there}" + (f"; so far {brief(row)}" if by_cell(row) else "")
        return f"{about}: **{claims.worded(row)}** ({brief(row)})"

    main = by["best-everywhere"]
    first = leading(main) if main["held"] is not None and by_cell(main) else \
        told("DP-NGD is more accurate than every tuned baseline at every privacy budget", main) + "."
    return [
        f"{first} {told('Its lead falls from ε = 1 to 8', by['stricter-larger'])}.",
        f"{told('It reaches the best accuracy of the baselines in a fraction of their steps', by['fewer-steps'])}; "
        f"{told('one of its steps costs no more than in the paper', by['step-cost-bench'])}.",
        f"{told('Beyond the paper: it is also ahead with nothing tuned and no public data', by['untuned-ahead'])}; "
        f"{told('it loses less than a point to tuned DP-NGD', by['untuned-level'])}.",
    ]


def leading(row: Row) -> str:
    """In how many cells DP-NGD leads the best baseline, by how much, and where that is significant."""
    least = by_cell(row).values()
    return (f"DP-NGD leads the best baseline in {sum(e > 0 for e in least)} of {len(least)} cells ({min(least):+.2f} "
            f"to {max(least):+.2f} points); in {row['held']} the lead is significant after correction. That it is more "
            f"accurate than every baseline in every cell is **{claims.worded(row)}**.")


MAIN = ("best-everywhere", "stricter-larger", "fewer-steps", "step-cost-bench")  # the paper's claims that `found` tells


def refuted(rows: Sequence[Row]) -> str:
    """The paper's claims that these runs refute, with the numbers of each, but for the main ones; empty without any."""
    said = [f"“{r['sentence'].rstrip('.')}” ({brief(r)}{'; fragile' if r['fragile'] else ''})" for r in rows
            if not r["question"] and r["word"] == stats.REFUTED and r["id"] not in MAIN]
    also = any(r["id"] in MAIN and r["word"] == stats.REFUTED for r in rows)
    return labelled(f"{'Also refuted' if also else 'Refuted'} here: {'; '.join(said)}.") if said else ""


def brief(row: Row) -> str:
    """The range of a claim's estimates, and in how many of its cells it is shown. Of a cell with several rivals the
    best one counts, and costs are told as multiples."""
    found = [(p["name"], p["estimate"]) for p in row["parts"] if p["estimate"] is not None]
    if not found:
        return labelled(row["brief"])
    if row["unit"].startswith(" times a DP-SGD"):
        costs = sorted(e for _, e in found)
        span = " to ".join(dict.fromkeys(f"{c:.2f}" for c in (costs[0], costs[-1])))
        return f"{span}{row['unit']}; the paper: {listed_costs()}"
    least = by_cell(row)
    sign = "+" if "points" in row["unit"] else ""
    ends = dict.fromkeys(f"{e:{sign}.2f}" for e in (min(least.values()), max(least.values())))
    holm = "" if row["word"] == stats.REPRODUCED else "after Holm "
    held = f"shown {holm}in {row['held']} of {row['cells']}; " if row["held"] is not None and row["cells"] > 1 else ""
    rival = rules.OVER_BEST if len(least) < len(found) else ""
    return f"{held}{' to '.join(ends)}{row['unit']}{rival}"


def by_cell(row: Row) -> dict[str, float]:
    """Cell -> estimate, of several baselines that over the best one."""
    return {cell: part["estimate"] for cell, part in parts_by_cell(row).items()}


def parts_by_cell(row: Row) -> dict[str, Mapping[str, Any]]:
    least: dict[str, Mapping[str, Any]] = {}
    parts = [p for p in row["parts"] if p["estimate"] is not None]
    for part in parts:
        cell, _, rival = part["name"].partition(" over ")
        # Each comparison is a cell, where the rival is no baseline or there are as many cells.
        alone = rival.split(" ")[0].rstrip(",") not in baselines() or row["cells"] == len(parts)
        cell = part["name"] if alone else cell
        least[cell] = min(least.get(cell, part), part, key=lambda p: p["estimate"])
    return least


def listed_costs() -> str:
    costs = sorted(claims.paper_step_cost().values())
    return f"{costs[0]:.1f} to {costs[-1]:.1f}"


# ---- HTML that reads well in JupyterLab, on a code host that drops styles, and in dark mode --------------------------

COLOURS = {stats.REPRODUCED: "#00734f", stats.REFUTED: "#b03a00", stats.EQUIVALENT: "#8a5a00",
           stats.INCONCLUSIVE: "#8a5a00"}
MARKS = {stats.REPRODUCED: "✓", stats.REFUTED: "✗", stats.EQUIVALENT: "≈", stats.INCONCLUSIVE: "?"}
LEFT = "text-align: left; vertical-align: top"


def badge(row: Row) -> str:
    """The word of a claim, white on its colour, with a mark for those who see no colour."""
    word = claims.worded(row)
    return f'<b style="background: {COLOURS.get(row["word"], "#5b6470")}; color: #fff; padding: 1px 6px; ' \
           f'border-radius: 4px; white-space: nowrap">{MARKS.get(row["word"], "–")} {html.escape(word)}</b>'


def bold_html(text: Any) -> str:
    """Escaped, with **text** in bold."""
    return re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", html.escape(str(text), quote=False))


def html_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], raw: Sequence[int] = ()) -> str:
    """A left-aligned table; cells of the columns `raw` are HTML already."""
    head = "".join(f'<th style="{LEFT}">{bold_html(c)}</th>' for c in columns)
    body = "\n".join("<tr>" + "".join(f'<td style="{LEFT}">{cell if i in raw else bold_html(cell)}</td>'
                                      for i, cell in enumerate(row)) + "</tr>" for row in rows)
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>"


def claim(row: Row) -> str:
    """A claim with what one sees and its verdict."""
    asked = f"<p><b>{bold_html(row['question'])}</b></p>\n" if row["question"] else ""
    paper = f" The paper: {bold_html(labelled(row['paper']))}." if row["paper"] else ""
    decided = row["word"] not in (stats.NOT_RUN, stats.DEMONSTRATION)
    sees = f"<p>What one sees: {bold_html(seen(row))}</p>\n" if decided else ""
    told = verdict(row)
    if told.startswith(seen(row).rstrip(".")):  # one comparison: it is told above, and what is left is its n
        told = told.removeprefix(seen(row).rstrip(".")).strip(" .")
        told = re.sub(r"^\((.*?)\)", r"\1", told) + "." if told else ""
    said = " ".join(labelled(x) for x in (told, row["power_said"], row["would_decide"], row["further"]) if x) \
        if decided else seen(row)
    return f"{asked}<p><b>{bold_html(row['sentence'])}</b> ({bold_html(row['place'])}).{paper}</p>\n" \
           f"{sees}<p>{badge(row)} {bold_html(said)}</p>"


def verdict(row: Row) -> str:
    """What `said` says after the word, which the badge has."""
    return sentence(labelled(row["said"]).removeprefix(f"{row['word'].capitalize()}: "))
