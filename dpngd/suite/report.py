"""figures/<profile>/index.html and claims.json, from the entries that the notebooks left there.

One page, nothing fetched from elsewhere: pictures and styles are inside it. It begins with what is missing (planned
runs that do not exist), an abstract of five sentences made from the claims, and one picture; then the claims by
artifact, the figures and tables, the audit (results/audit.json), the bench (results/bench.json), deviations and
provenance with the protocol's commit. A picture that an entry names and the folder lacks is an error, not a gap.
`dpngd report quick` writes the page again, `dpngd report cpu --docs` the table of docs/claims.md.
"""

from __future__ import annotations

import argparse
import base64
import html
import json
import re
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from dpngd.errors import UsageError
from dpngd.files import read_json, write_atomically
from dpngd.methods import baselines
from dpngd.suite import claims, paths, profiles, stats, story
from dpngd.suite.params import deviations, published
from dpngd.suite.store import Store
from dpngd.suite.study import ARTIFACTS, bench_report, configs, results_stamp

REMEDY = "write it again, or `git checkout` it"


def entries(folder: Path) -> dict[str, dict]:
    """What each notebook left, in the notebooks' order."""
    found = {}
    for notebook in ARTIFACTS:
        path = folder / f"{notebook}.json"
        if path.exists():
            found[notebook] = read_json(path, REMEDY)
    return found


def claim_rows(left: dict[str, dict]) -> list[dict[str, Any]]:
    """Every claim, decided or not run: none is left out because its notebook was."""
    decided = {row["id"]: row for entry in left.values() for row in entry["claims"]}
    return [decided.get(c.id) or claims.decide(c, {}) for c in claims.all_claims()]


PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.(png|svg|csv)")


def check_files(left: dict[str, dict], folder: Path) -> None:
    """Every file that an entry names is a plain name (no path, no scheme: the page links to it), and is there."""
    named = [figure[kind] for entry in left.values() for figure in entry["figures"] for kind in ("png", "svg", "csv")
             if kind in figure]
    named += [table["csv"] for entry in left.values() for table in entry["tables"]]
    for name in named:
        if not isinstance(name, str) or not PLAIN.fullmatch(name) or (folder / name).is_symlink():
            raise UsageError(f"an entry in {folder.name}/ names the file {name!r}: only plain .png, .svg and .csv "
                             "files of that folder are shown; run run_all.py again")
    missing = [name for name in named if not (folder / name).exists()]
    if missing:
        raise UsageError(f"{', '.join(missing)} missing from {folder.name}/: run run_all.py again")


def write_report(profile: str, folder: Path) -> Path:
    """The page and claims.json of what is in `folder`."""
    left = entries(folder)
    if not left:
        raise UsageError(f"{folder.name}/ has no notebook's results: run run_all.py --profile {profile}")
    check_files(left, folder)
    for notebook, entry in left.items():
        if any(not row.keys() >= set(claims.ROW) for row in entry["claims"]):
            raise UsageError(f"{folder.name}/{notebook}.json is of another edition: run dpngd run --profile {profile}")
    rows = claim_rows(left)
    settings = profiles.load(profile)
    stamp = results_stamp(profile, Store(profile), shown_keys(left))
    data = {"profile": profile, "edition": claims.EDITION, "about": settings.about, "stamp": stamp,
            "paper": published()["paper"]["title"], "claims": rows, "compute": compute(left, settings),
            "protocol": protocol(folder, stamp), "rules": rule_table()}
    data["opening"], data["abstract"] = opening(settings), abstract(data)
    write_atomically(folder / "claims.json", json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    page = folder / "index.html"
    write_atomically(page, render(data, left, folder, settings))
    return page


def rule_table() -> str:
    """The table of rules in the docstring of `stats`."""
    return next(part for part in (stats.__doc__ or "").split("\n\n") if part.startswith("| claim"))


def shown_keys(left: dict[str, dict]) -> set[str]:
    """The runs behind all of it."""
    return {key for entry in left.values() for key in entry["compute"]["keys"]}


def compute(left: dict[str, dict], settings: profiles.Profile) -> dict[str, Any]:
    """Runs, core hours and hardware; runs that two notebooks share are counted once. `planned` are the runs that the
    profile asks for, `there` how many of them exist; `tests` the same two numbers of those on a test set."""
    keys, store = shown_keys(left), Store(settings.name)
    records = [record for key in sorted(keys) if (record := store.find(key))]
    planned = {c.key(): c.validation == 0 for notebook in ARTIFACTS for group in configs(notebook, settings).values()
               for c in group}
    there = [key for key in planned if store.find(key) is not None]
    return {"runs": len(keys), "planned": len(planned), "there": len(there),
            "tests": {"planned": sum(planned.values()), "there": sum(planned[key] for key in there)},
            "commits": sorted({r.get("where", {}).get("commit", "unknown") for r in records}),
            "seeds": sorted({r["config"]["seed"] for r in records if "seed" in r.get("config", {})}),
            "hours": round(sum(r["seconds"]["total"] for r in records) / 3600, 3),
            "hardware": sorted({h for entry in left.values() for h in entry["compute"]["hardware"]}),
            "largest_run_s": round(max((r["seconds"]["total"] for r in records), default=0.0), 1)}


def git(*words: str) -> list[str]:
    """The lines that git prints; none where there is no git or no repository."""
    try:
        done = subprocess.run(["git", *words], cwd=paths.ROOT, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else []


def protocol(folder: Path, stamp: str) -> dict[str, str] | None:
    """The commits of docs/protocol.md: the first, with which the rules were fixed, and the last that changed it.

    Asked of git, and kept in claims.json: drawn again from the same results where there is no git, or only a part of
    the history, the page says the same. None where no commit is known; uncommitted changes are never named."""
    path = folder / "claims.json"
    kept = read_json(path, REMEDY) if path.exists() else {}
    known = kept.get("protocol") if kept.get("stamp") == stamp else None
    lines = git("log", "--follow", "--format=%h %cs", "--", "docs/protocol.md")
    if not lines or (known and git("rev-parse", "--is-shallow-repository") != ["false"]):
        return known
    (last, changed), (first, fixed) = lines[0].split(), lines[-1].split()
    return {"first": first, "fixed": fixed, "last": last, "changed": changed}


# ---- What was found, in five sentences -------------------------------------------------------------------------------

def opening(settings: profiles.Profile) -> str:
    """What DP-NGD is, and what the profile's Table 2 asks for."""
    runs = settings.configs("utility_table")
    rivals = len({c.method for c in runs} & set(baselines()))
    budgets = max(len({c.epsilon for c in runs if c.data == d}) for d in {c.data for c in runs})
    network = {"small": "a small network"}.get(runs[0].model, runs[0].model) if len({c.model for c in runs}) == 1 \
        else "the paper's networks"

    def many(n: int, what: str) -> str:
        return f"{NUMBERS.get(n, n)} {what}{'' if n == 1 else 's'}"

    return ("DP-NGD clips and adds noise after whitening by curvature from public images. It is compared here with "
            f"{many(rivals, 'baseline')} on {many(len({c.data for c in runs}), 'data set')}, at "
            f"{many(budgets, 'privacy budget')} with {many(len({c.seed for c in runs}), 'seed')} each, on {network}.")


NUMBERS = dict(enumerate(("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")))


def compact(numbers: list[int]) -> str:
    """100 to 107, 200."""
    spans: list[list[int]] = []
    for n in numbers:
        if spans and n == spans[-1][1] + 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    return ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in spans)


OTHER = {False: "claim", True: "other claim"}  # the main ones are told before


def abstract(data: Mapping[str, Any]) -> list[str]:
    """Five sentences from the rows of the claims: nothing in them but their words and numbers. **Text** is bold."""
    rows = {row["id"]: row for row in data["claims"]}
    papers = [row for row in data["claims"] if not row["question"]]

    def told(*ids: str) -> str:
        said = [f"{rows[i]['sentence'].rstrip('.')}: **{claims.worded(rows[i])}**{numbers(rows[i])}" for i in ids]
        return "; ".join([said[0], *(x[0].lower() + x[1:] if x[1:2].islower() else x for x in said[1:])]) + "."

    def numbers(row: Mapping[str, Any]) -> str:
        if row["word"] == stats.NOT_RUN:
            return f" ({row['runs']:,} of {row['planned']:,} planned runs are there)" if row["planned"] else ""
        return f" ({story.brief(row)})"

    counts = {word: n for word, n in tally(papers) if n}
    found = data["compute"]
    runs = f"all {found['planned']:,} planned runs" if found["there"] == found["planned"] else \
        f"{found['there']:,} of {found['planned']:,} planned runs"
    if data["profile"] in claims.DEMONSTRATIONS:
        first = f"The paper makes {len(papers)} claims that can be tested; {runs} show them at work, and decide none."
        steady = [rows[c.id] for c in claims.all_claims() if c.steady and rows[c.id]["word"] != stats.NOT_RUN]
        fourth = f"What must hold on every machine (theorems, privacy, counts) holds in " \
                 f"{sum(bool(row['holds']) for row in steady)} of {len(steady)} checks."
    else:
        first = f"The paper makes {len(papers)} claims that can be tested; on {runs} they come out as " \
                f"{', '.join(f'**{n} {word}**' for word, n in counts.items())}."
        against = [row["sentence"].rstrip(".") for row in papers if row["word"] == stats.REFUTED]
        same = [f"“{row['sentence'].rstrip('.')}”" for row in papers if row["word"] == stats.EQUIVALENT]
        unsure = f"; there is no difference of {stats.MARGIN:g} point or more where it says {story.listed(same)}" \
            if same else ""
        unsure += "".join(f"; {counts[word]} {'is' if counts[word] == 1 else 'are'} {word}"
                          for word in (stats.INCONCLUSIVE, stats.NOT_TESTABLE, stats.NOT_RUN) if word in counts)
        others = story.refuted(data["claims"]).rstrip(".")
        fourth = f"{others or f'No {OTHER[bool(against)]} of the paper is refuted here'}{unsure}."
    main = rows["best-everywhere"]
    leads = main["held"] is not None and story.by_cell(main)
    second = f"{story.leading(main)} {told('stricter-larger')}" if leads else told("best-everywhere", "stricter-larger")
    return [first, second, told("fewer-steps", "step-cost-bench"), fourth,
            told("untuned-ahead", "untuned-level")]


# ---- The page --------------------------------------------------------------------------------------------------------

SHOWN_IN = {"theory": "theorem", "utility_table": "lead", "between": "lead_between", "mean_choice": "lead_by_mean"}
SHOWN_ELSEWHERE = {"same-privacy": "privacy", "total-time": "time_to_peak", "theorem-mean": ""}
"""The figure (or table) of a claim has the name of its artifact, but for these artifacts and these claims ("": none
shows it, its sentence has the number)."""


def shown_in(claim: claims.Claim) -> str:
    source = claim.source.split("+")[0].removesuffix("_equal")
    return SHOWN_ELSEWHERE.get(claim.id, SHOWN_IN.get(source, source))


def anchors(left: dict[str, dict]) -> dict[str, str]:
    """Claim -> the element of the page that shows its numbers; claims whose figure is not there are left out."""
    there = {t["name"]: f"table-{t['name']}" for entry in left.values() for t in entry["tables"]}
    there |= {f["name"]: f"figure-{f['name']}" for entry in left.values() for f in entry["figures"]}
    if bench_report() is not None:
        there["bench"] = "bench"
    return {c.id: there[shown_in(c)] for c in claims.all_claims() if shown_in(c) in there}


def grouped(rows: list[dict[str, Any]]) -> list[tuple[str, list[dict], list[dict]]]:
    """The claims by notebook, that is by artifact of the paper: the paper's own, and our questions."""
    found = []
    for notebook in ARTIFACTS:
        mine = [row for row in rows if row["notebook"] == notebook]
        if mine:
            found.append((notebook, [r for r in mine if not r["question"]], [r for r in mine if r["question"]]))
    return found


def render(data: dict[str, Any], left: dict[str, dict], folder: Path, settings: profiles.Profile) -> str:
    env = jinja2.Environment(loader=jinja2.FileSystemLoader(paths.TEMPLATES), autoescape=True, trim_blocks=True,
                             lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    env.filters |= {"bold": lambda text: Markup(story.bold_html(text)), "plain": story.labelled}
    papers = [row for row in data["claims"] if not row["question"]]
    row = next(row for row in data["claims"] if row["id"] == "best-everywhere")
    said = preliminary(row, len({c.seed for c in settings.configs("utility_table")}))
    leads = [{**f, "caption": f"{said}{f['caption']}"} for entry in left.values() for f in entry["figures"]
             if f["name"] == "lead" and said is not None]
    return env.get_template("report.html.j2").render(
        **data, left=left, image=lambda name: picture(folder / name), width=lambda name: width(folder / name),
        lead=leads[0] if leads else None, groups=grouped(data["claims"]), anchor=anchors(left), interval=interval,
        power=power, listed=comparisons, told=told_by(data["claims"], anchors(left)), seen=story.seen, compact=compact,
        counts=tally(papers), total=len(papers), undecided=sum(r["word"] == stats.NOT_RUN for r in papers),
        audit=audit_part(folder), bench=bench_part(folder), deviations=deviations(),
        inconsistencies=published()["inconsistencies"], defaults=settings.settings["defaults"],
        device=settings.settings["cost"]["device"], heading=heading, css_class=lambda word: word.replace(" ", "-"),
        seeds_of=claims.seeds_text, worded=claims.worded, demonstration=data["profile"] in claims.DEMONSTRATIONS)


def preliminary(row: Mapping[str, Any], seeds: int) -> str | None:
    """What is said before the caption of the one picture at the top, from the row of its claim and the number of seeds
    that the profile plans: nothing once it is decided, else how many cells are complete. None while no data set is
    complete: of a few runs the picture would say nothing."""
    if row["word"] != stats.NOT_RUN:
        return ""
    complete: dict[str, bool] = {}
    for part in row["parts"]:
        cell = part["name"].partition(" over ")[0]
        complete[cell] = complete.get(cell, True) and part["n"] >= seeds
    datasets = {cell.split(" ")[0] for cell in complete}
    if not any(all(done for cell, done in complete.items() if cell.split(" ")[0] == d) for d in datasets):
        return None
    return f"Preliminary: {sum(complete.values())} of {len(complete)} cells. "


def comparisons(c: Mapping[str, Any]) -> list[str]:
    """The comparisons of a claim one by one (of a cell with several rivals the best), as `ours` tells them."""
    return claims.without_tally(c["ours"]).split("; ")


def told_by(rows: list[dict[str, Any]], anchor: Mapping[str, str]) -> dict[str, list[dict[str, Any]]]:
    """Element of the page -> the decided claims that it shows."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["id"] in anchor and row["word"] not in (stats.NOT_RUN, stats.DEMONSTRATION):
            found.setdefault(anchor[row["id"]], []).append(row)
    return found


def interval(c: Mapping[str, Any]) -> str:
    """The estimate that a claim's word rests on."""
    if c["estimate"] is None or c["word"] in (stats.NOT_RUN, stats.DEMONSTRATION):
        return ""
    digits = 3 if "nats" in c["unit"] else 2
    ends = "" if None in (c["low"], c["high"]) else f" [{c['low']:.{digits}f}, {c['high']:.{digits}f}]"
    return f"{c['estimate']:.{digits}f}{ends}{c['unit']}"


def power(c: Mapping[str, Any]) -> str:
    """The smallest difference (or factor, or margin) that a claim's runs see with 80 % power."""
    if c["power"] is None or c["word"] in (stats.NOT_RUN, stats.DEMONSTRATION):
        return ""
    return f"{c['power']:.3f}{c['unit']}" if "nats" in c["unit"] else f"{c['power']:.2f}{c['unit']}" if "points" in \
        c["unit"] else f"factor {c['power']:.2f}"


def audit_part(folder: Path) -> dict[str, Any] | None:
    """The stored audit and its self-test as tables, the canary's figure drawn into the folder; None without one."""
    if not paths.AUDIT.exists():
        return None
    from dpngd.suite import figures, plots, tables

    stored = read_json(paths.AUDIT, REMEDY)
    found: dict[str, Any] = {"tables": [saved(folder, *tables.audit(stored))], "canary": None}
    if paths.SELF_TEST.exists():
        leaks = read_json(paths.SELF_TEST, REMEDY)
        found["tables"].append(saved(folder, *tables.self_test(leaks)))
    if stored.get("canary"):
        plots.save(figures.canary(stored), folder, "audit_canary")
        found["canary"] = "audit_canary"
    return found


def bench_part(folder: Path) -> dict[str, Any] | None:
    """The stored bench as tables: ratios beside their goals and the paper's, and seconds; None without one."""
    report = bench_report()
    if report is None:
        return None
    from dpngd.suite import tables

    found = [saved(folder, *tables.bench_ratios(report)), saved(folder, *tables.bench_seconds(report))]
    where = ", ".join(f"{said}{report[k]}" for k, said in (("cpu", ""), ("torch", "torch ")) if report.get(k))
    return {"tables": [t for t in found if t["rows"]], "where": where, "threads": report.get("threads")}


def saved(folder: Path, table: Any, name: str, caption: str, data: Any) -> dict[str, Any]:
    """A table as the page shows it, with its CSV in the folder."""
    write_atomically(folder / f"{name}.csv", data.to_csv(index=False))
    return {"name": name, "caption": caption, "columns": list(table.columns), "csv": f"{name}.csv",
            "rows": table.astype(str).to_numpy().tolist()}


def width(path: Path) -> int:
    """Pixels below which the letters of a picture are too small on a phone: 80 per inch of the figure."""
    from dpngd.suite import plots

    return round(80 * struct.unpack(">I", path.read_bytes()[16:20])[0] / plots.DPI)


def picture(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()


def heading(notebook: str) -> str:
    """A notebook's title: the first line of its first cell."""
    cells = json.loads((paths.NOTEBOOKS / f"{notebook}.ipynb").read_text(encoding="utf-8"))["cells"]
    return html.unescape("".join(cells[0]["source"]).splitlines()[0].lstrip("# "))


def tally(rows: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """How often each word was reached; a demonstration has one word."""
    words = [row["word"] for row in rows]
    return [(word, words.count(word)) for word in (*stats.WORDS, stats.DEMONSTRATION)
            if word != stats.DEMONSTRATION or word in words]


def markdown(data: dict[str, Any]) -> str:
    """The claims of a claims.json: their count, and a table with a claim of many parts in one line."""
    said = []
    for whose, asked in (("The paper's {} claims: {}.", False), ("{} questions of ours: {}.", True)):
        part = [c for c in data["claims"] if bool(c["question"]) == asked]
        said.append(whose.format(len(part), ", ".join(f"{n} {word}" for word, n in tally(part) if n)))
    rows = [" ".join(said), "",
            "| claim | paper | ours, 95% interval | n | smallest visible effect | verdict | notebook |",
            "| --- | --- | --- | --- | --- | --- | --- |"]
    for c in data["claims"]:
        paper, ours = story.labelled(c["paper"] or "-"), story.labelled(c["brief"])
        cells = (c["sentence"], f"{paper} ({c['place']})", ours, claims.seeds_text(c), power(c),
                 f"**{claims.worded(c)}**", c["notebook"][:2])
        rows.append("| " + " | ".join("-" if x in (None, "") else str(x).replace("|", "/") for x in cells) + " |")
    return "\n".join(rows)


DOCS = """# Claims

Written by `dpngd report {profile} --docs` from figures/{profile}/claims.json: do not edit.
{stamp}

{table}

n: seeds (of counts, runs). Smallest visible effect: the difference that this n sees with 80 % power; for a claim of no
change, the smallest margin within which it shows none. Fragile: leaving out one seed changes the verdict. Intervals
cover seeds and test images{seeds_only}. Differences are in points of accuracy, and ratios have no unit. Network and
private set are smaller here than in the paper, so do not compare accuracies with the paper's, only who is ahead and by
how much.

## What each claim says

{details}

## The rules

{rules}

A part that was not run keeps its claim at "not run". Everything else about the estimates is in the docstring of
`dpngd/suite/stats.py`.
"""


NO_RUNS = "No runs of this edition yet."


def current(profile: str) -> dict[str, Any]:
    """What figures/<profile>/claims.json holds; every claim as not run where there is none of this edition."""
    path = paths.FIGURES / profile / "claims.json"
    found = read_json(path, REMEDY) if path.exists() else {}
    if found.get("edition") == claims.EDITION:
        return found
    return {"profile": profile, "stamp": NO_RUNS,
            "claims": claim_rows({})}


def docs(profile: str) -> str:
    """docs/claims.md: the table, and for each claim its numbers, its power and what would decide it."""
    data = current(profile)
    details = []
    for c in data["claims"]:
        if c["word"] == stats.NOT_RUN:
            continue
        said = " ".join(story.labelled(x) for x in (c["said"], c["power_said"], c["would_decide"], c["further"]) if x)
        details.append(f"- **{c['sentence']}**{' ' + c['question'] if c['question'] else ''} {said}")
    waiting = sum(c["word"] == stats.NOT_RUN for c in data["claims"])
    if waiting:
        details.append(f"- {waiting} claims are not run: the table above has how many of their runs there are.")
    only = any(c["n"] and not c["images"] and c["unit"] == " points" for c in data["claims"])
    return DOCS.format(profile=profile, stamp=data["stamp"], table=markdown(data),
                       details="\n".join(details), rules=rule_table(),
                       seeds_only=" (seeds only where \"only\" is written)" if only else "")


def main(args: argparse.Namespace) -> int:
    """Write the page, or print the claims as `command.report`'s options say."""
    if args.notebooks is not None:
        from dpngd.suite.execute import restore

        return restore(args.notebooks, check=args.check)
    folder = paths.FIGURES / args.profile
    if args.docs:
        path = paths.ROOT / "docs" / "claims.md"
        write_atomically(path, docs(args.profile))
        print(path.relative_to(paths.ROOT))
    elif args.markdown or args.json:
        path = folder / "claims.json"
        if not path.exists():
            raise UsageError(f"figures/{args.profile}/claims.json is missing: run dpngd run --profile "
                             f"{args.profile}")
        left = read_json(path, REMEDY)
        if left.get("edition") != claims.EDITION:
            raise UsageError(f"figures/{args.profile}/claims.json is of another edition: run dpngd run --profile "
                             f"{args.profile}")
        if args.json:
            print(json.dumps(left["claims"], indent=1, ensure_ascii=False))
        else:
            print(markdown(left))
    else:
        print(write_report(args.profile, folder).relative_to(paths.ROOT))
    return 0
