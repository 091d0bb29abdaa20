"""`dpngd data`: what is there (status), get and prepare (fetch), look at it (show). torch is imported after parsing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from dpngd.data import sets
from dpngd.errors import Parser, UsageError, unknown

if TYPE_CHECKING:
    from dpngd.data.prepared import Prepared

COLUMNS = ("name", "role", "state", "N", "test", "classes", "digest", "source")


def rows(root: str | None) -> list[dict[str, object]]:
    """One row per data set; nothing is downloaded, converted or written."""
    from dpngd.data.private import load_private
    from dpngd.data.sources import SOURCES, folders, obtain

    table = []
    for name in SOURCES:
        row = {"name": name, "role": "public" if name in sets.public_sets() else "private"}
        source = SOURCES[name]
        found = next((p for p in folders(root) if (p / f"{source.form.file}.npz").exists()), None)
        if found is None:
            table.append({**row, "state": "not prepared", "source": f"dpngd data fetch {name}"})
            continue
        try:
            table.append({**row, "state": "ready", **_counts(obtain(name, root, download=False))})
        except UsageError as error:
            table.append({**row, "state": "broken", "source": str(error)})
    digits = load_private("digits")
    made = {"name": "digits", "role": "private", "state": "ready", "N": digits.N, "test": len(digits.x_test)}
    table.append({**made, "classes": digits.classes, "digest": digits.digest, "source": digits.source})
    for name in sets.made_sets():
        table.append({"name": name, "role": "public", "state": "ready", "source": sets.SETS[name].about})
    return [{column: row.get(column) for column in COLUMNS} for row in table]


def _counts(prepared: Prepared) -> dict[str, object]:
    """What a run would get: UTKFace counts without its duplicates and after its split."""
    from dpngd.data.private import split_faces

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
    """Print the table of what is there."""
    from dpngd.data.sources import folders

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
    """Get each set; where one fails, the others are still tried."""
    from dpngd.data.sources import SOURCES, obtain

    embedded = [s.name for s in sets.SETS.values() if s.file is None]
    for name in names:
        if name not in (*SOURCES, *embedded):
            raise unknown("data set", name, [*SOURCES, *embedded])
    failures = []
    for name in names:
        if name in embedded:
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
    """Save a montage: one row per class of a private set (at most ten rows), or 50 images of a public one."""
    if out is not None and not Path(out).name.lower().endswith(".png"):
        raise UsageError(f"--out {out}: the montage is a PNG, end the name in .png")
    if out is not None and not Path(out).absolute().parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {Path(out).parent}, make it first")
    from dpngd.data.images import montage, per_class, save_png
    from dpngd.data.private import load_private
    from dpngd.data.public import load_public
    from dpngd.data.sources import folders, writable

    if name in sets.private_sets():
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
    parser = Parser(prog="dpngd data", description="Data sets: what is there (status), get and prepare them (fetch), "
                                                   "look at one (show).")
    parser.add_argument("--root", help="folder of the data sets, in place of $DPNGD_DATA and data/")
    commands = parser.add_subparsers(dest="command", required=True, metavar="status|fetch|show")
    command = commands.add_parser("status", help="a table of what is there")
    command.add_argument("--json", action="store_true", help="for programs")
    command = commands.add_parser("fetch", help="get data sets and prepare them; downloads only here")
    command.add_argument("names", nargs="+", metavar="NAME", help="of cifar10, cifar100, svhn, utkface, imagenet")
    command = commands.add_parser("show", help="save a montage of a data set")
    command.add_argument("name", metavar="NAME",
                         help=f"of {', '.join(sets.SETS)}, npz:PATH, folder:PATH, or a+b")
    command.add_argument("--out", metavar="FILE.png", help="where to save it; the folder must exist")
    command.add_argument("--seed", type=int, default=0, help="of the draw of a public set")
    arguments = parser.parse_args(argv)
    if arguments.command == "status":
        status(arguments.root, arguments.json)
    elif arguments.command == "fetch":
        fetch(arguments.names, arguments.root)
    else:
        show(arguments.name, arguments.root, arguments.out, arguments.seed)
    return 0
