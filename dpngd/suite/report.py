"""figures/<profile>/index.html and claims.json, from the entries that the notebooks left there.

One page, nothing fetched from elsewhere: pictures and styles are inside it. A picture that an entry names and the
folder lacks is an error, not a gap. `dpngd report quick` writes the page again.
"""

from __future__ import annotations

import argparse
import base64
import html
import json
import re
from pathlib import Path
from typing import Any

import jinja2
import yaml

from dpngd.errors import UsageError
from dpngd.files import write_atomically
from dpngd.suite import claims, paths, profiles, stats
from dpngd.suite.params import published
from dpngd.suite.store import Store
from dpngd.suite.study import ARTIFACTS, results_stamp


def entries(folder: Path) -> dict[str, dict]:
    """What each notebook left, in the notebooks' order."""
    found = {}
    for notebook in ARTIFACTS:
        path = folder / f"{notebook}.json"
        if path.exists():
            found[notebook] = json.loads(path.read_text(encoding="utf-8"))
    return found


def claim_rows(left: dict[str, dict]) -> list[dict[str, Any]]:
    """Every claim, decided or not run: none is left out because its notebook was."""
    decided = {row["id"]: row for entry in left.values() for row in entry["claims"]}
    return [decided.get(c.id) or claims.decide(c, {}) for c in claims.all_claims()]


PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.(png|svg|csv)")


def check_files(left: dict[str, dict], folder: Path) -> None:
    """Every file that an entry names is a plain name (no path, no scheme: the page links to it), and is there."""
    named = [file for entry in left.values() for figure in entry["figures"] for file in (figure["png"], figure["svg"])]
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
    rows = claim_rows(left)
    settings = profiles.load(profile)
    data = {"profile": profile, "about": settings.about,
            "stamp": results_stamp(profile, Store(profile), shown_keys(left)), "paper": published()["paper"]["title"],
            "claims": rows, "compute": compute(left, profile), "rules": (stats.__doc__ or "").split("\n\n")[2]}
    write_atomically(folder / "claims.json", json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    page = folder / "index.html"
    write_atomically(page, render(data, left, folder, settings))
    return page


def shown_keys(left: dict[str, dict]) -> set[str]:
    """The runs behind all of it."""
    return {key for entry in left.values() for key in entry["compute"]["keys"]}


def compute(left: dict[str, dict], profile: str) -> dict[str, Any]:
    """Runs, core hours and hardware; runs that two notebooks share are counted once."""
    keys, store = shown_keys(left), Store(profile)
    records = [record for key in sorted(keys) if (record := store.find(key))]
    return {"runs": len(keys), "hours": round(sum(r["seconds"]["total"] for r in records) / 3600, 3),
            "hardware": sorted({h for entry in left.values() for h in entry["compute"]["hardware"]}),
            "largest_run_s": round(max((r["seconds"]["total"] for r in records), default=0.0), 1)}


def render(data: dict[str, Any], left: dict[str, dict], folder: Path, settings: profiles.Profile) -> str:
    env = jinja2.Environment(loader=jinja2.FileSystemLoader(paths.TEMPLATES), autoescape=True, trim_blocks=True,
                             lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    papers = [row for row in data["claims"] if not row["question"]]
    return env.get_template("report.html.j2").render(
        **data, left=left, image=lambda name: picture(folder / name),
        counts=tally(papers), total=len(papers),
        deviations=yaml.safe_load((paths.TEMPLATES / "deviations.yaml").read_text(encoding="utf-8")),
        inconsistencies=published()["inconsistencies"], defaults=settings.settings["defaults"], seeds=settings.seeds,
        device=settings.settings["cost"]["device"], heading=heading, css_class=lambda word: word.replace(" ", "-"),
        answer=claims.answer, seeds_of=claims.seeds_text)


def picture(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()


def heading(notebook: str) -> str:
    """A notebook's title: the first line of its first cell."""
    cells = json.loads((paths.NOTEBOOKS / f"{notebook}.ipynb").read_text(encoding="utf-8"))["cells"]
    return html.unescape("".join(cells[0]["source"]).splitlines()[0].lstrip("# "))


def tally(rows: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """How often each verdict was reached."""
    words = [row["verdict"] for row in rows]
    return [(word, words.count(word)) for word in stats.VERDICTS]


def markdown(data: dict[str, Any]) -> str:
    """The claims of a claims.json for the README: their count, and a table with a claim of many parts in one line."""
    said = []
    for whose, asked in (("The paper's {} claims: {}.", False), ("{} questions of ours: {}.", True)):
        part = [c for c in data["claims"] if bool(c["question"]) == asked]
        said.append(whose.format(len(part), ", ".join(f"{n} {word}" for word, n in tally(part) if n)))
    rows = [" ".join(said), "", "| claim | paper | ours | n | verdict | notebook |",
            "| --- | --- | --- | --- | --- | --- |"]
    for c in data["claims"]:
        who = " (ours to ask)" if c["question"] else ""
        cells = (c["sentence"] + who, f"{c['paper'] or '-'} ({c['place']})", c["brief"], claims.seeds_text(c),
                 f"**{c['verdict']}**", c["notebook"][:2])
        rows.append("| " + " | ".join("-" if x in (None, "") else str(x).replace("|", "/") for x in cells) + " |")
    return "\n".join(rows)


def put_into_readme(profile: str, table: str, path: Path | None = None) -> None:
    """Replace the profile's table, which lies between two comments of README.md (or of `path`)."""
    path = path or paths.ROOT / "README.md"
    text, marks = path.read_text(encoding="utf-8"), (f"<!-- claims:{profile} -->\n", "\n<!-- /claims -->")
    before, found, rest = text.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not found or not end:
        raise UsageError(f"{path.name} has no place for it: put {marks[0].strip()} and {marks[1].strip()} into it")
    write_atomically(path, before + marks[0] + table + marks[1] + after)


def main(args: argparse.Namespace) -> int:
    """Write the page, or print the claims as `command.report`'s options say."""
    if args.notebooks is not None:
        from dpngd.suite.execute import restore

        return restore(args.notebooks)
    folder = paths.FIGURES / args.profile
    if args.markdown or args.readme or args.json:
        path = folder / "claims.json"
        if not path.exists():
            raise UsageError(f"figures/{args.profile}/claims.json is missing: run dpngd run --profile "
                             f"{args.profile}")
        left = json.loads(path.read_text(encoding="utf-8"))
        if args.json:
            print(json.dumps(left["claims"], indent=1, ensure_ascii=False))
        elif args.readme:
            put_into_readme(args.profile, markdown(left))
        else:
            print(markdown(left))
    else:
        print(write_report(args.profile, folder).relative_to(paths.ROOT))
    return 0
