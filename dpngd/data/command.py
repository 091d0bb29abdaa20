"""`python -m dpngd.data`: what is there (status), get and prepare (fetch), look at it (show)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from dpngd.data.images import montage, per_class, save_png
from dpngd.data.prepared import Prepared
from dpngd.data.private import PRIVATE, load_private, split_faces
from dpngd.data.public import MADE_FROM, PUBLIC, load_public
from dpngd.data.sources import SOURCES, folders, obtain, writable
from dpngd.errors import UsageError, exit_code, unknown

EMBEDDED = ("digits", *MADE_FROM)
COLUMNS = ("name", "role", "state", "N", "test", "classes", "digest", "source")


def rows(root: str | None) -> list[dict[str, object]]:
    """One row for each data set; nothing is downloaded, converted or written."""
    table = []
    for name in SOURCES:
        row = {"name": name, "role": "public" if name in PUBLIC else "private"}
        source = SOURCES[name]
        found = next((p for p in folders(root) if (p / f"{source.form.file}.npz").exists()), None)
        if found is None:
            table.append({**row, "state": "not prepared", "source": f"python -m dpngd.data fetch {name}"})
            continue
        try:
            table.append({**row, "state": "ready", **_counts(obtain(name, root, download=False))})
        except UsageError as error:
            table.append({**row, "state": "broken", "source": str(error)})
    digits = load_private("digits")
    made = {"name": "digits", "role": "private", "state": "ready", "N": digits.N, "test": len(digits.x_test)}
    table.append({**made, "classes": digits.classes, "digest": digits.digest, "source": digits.source})
    for name, source in MADE_FROM.items():
        table.append({"name": name, "role": "public", "state": "ready", "source": source})
    return [{column: row.get(column) for column in COLUMNS} for row in table]


def _counts(prepared: Prepared) -> dict[str, object]:
    """What a run would get: UTKFace counts without its duplicates and after its split."""
    faces, pool = prepared.form.layout == "faces", prepared.form.layout == "pool"
    arrays = split_faces(prepared.arrays) if faces else prepared.arrays
    return {
        "N": len(arrays["x" if pool else "x_train"]),
        "test": None if pool else len(arrays["x_test"]),
        "classes": prepared.form.classes,
        "digest": prepared.digest,
        "source": prepared.source,
    }


def status(root: str | None, as_json: bool) -> None:
    table = rows(root)
    if as_json:
        print(json.dumps({"folders": [str(p) for p in folders(root)], "sets": table}, indent=2))
        return
    print(f"folders: {', '.join(str(p) for p in folders(root))}")
    cells = [COLUMNS, *(tuple(_cell(column, row[column]) for column in COLUMNS) for row in table)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(COLUMNS))]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _cell(column: str, value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)[:12] if column == "digest" else str(value)


def fetch(names: list[str], root: str | None) -> None:
    """Get each set; one that cannot be had does not keep the others from being tried."""
    for name in names:
        if name not in (*SOURCES, *EMBEDDED):
            raise unknown("data set", name, [*SOURCES, *EMBEDDED])
    failures = []
    for name in names:
        if name in EMBEDDED:
            print(f"{name}: nothing to fetch, it needs no file")
            continue
        try:
            prepared = obtain(name, root)
        except UsageError as error:
            failures.append(str(error))
            continue
        place = prepared.path or "no file: none of the folders can be written to"
        print(f"{name}: {place} ({prepared.source}, digest {prepared.digest[:12]})")
    if failures:
        raise UsageError(" | ".join(failures))


def show(name: str, root: str | None, out: str | None, seed: int) -> Path:
    """Save a montage: a row for each class of a private set (at most ten rows), or 50 images of a public one."""
    if name in PRIVATE:
        data = load_private(name, root=root)
        at = per_class(data.y_train, range(min(data.classes, 10)), 16)
        sheet, columns = data.x_train[at], 16
    else:
        sheet, columns = load_public(name, 50, seed=seed, root=root).x, 10
    file = f"{name.replace('/', '_').replace(':', '_')}.png"
    path = Path(out) if out else (writable(folders(root)) or Path()) / "montage" / file
    save_png(montage(sheet, columns, zoom=2 if sheet.shape[2] >= 32 else 6), path)
    print(path)
    return path


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dpngd.data", description=__doc__)
    parser.add_argument("--root", help="folder of the data sets, in place of $DPNGD_DATA and data/")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("status", help="a table of what is there")
    command.add_argument("--json", action="store_true", help="for programs")
    command = commands.add_parser("fetch", help="get data sets and prepare them")
    command.add_argument("names", nargs="+", metavar="NAME", help=f"of {', '.join(SOURCES)}")
    command = commands.add_parser("show", help="save a montage of a data set")
    command.add_argument("name", metavar="NAME", help=f"of {', '.join([*PRIVATE, *PUBLIC])}, folder:PATH, or a+b")
    command.add_argument("--out", metavar="FILE.png", help="where to save it")
    command.add_argument("--seed", type=int, default=0, help="of the draw of a public set")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    if arguments.command == "status":
        status(arguments.root, arguments.json)
    elif arguments.command == "fetch":
        fetch(arguments.names, arguments.root)
    else:
        show(arguments.name, arguments.root, arguments.out, arguments.seed)
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
