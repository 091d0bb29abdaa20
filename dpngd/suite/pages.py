"""Write the pages of docs/ that are made from data: `make docs`.

| page | made from |
| --- | --- |
| docs/deviations.md | params/deviations.yaml, params/published.yaml |

The report shows the same rows. A test compares the committed page with what this module makes.
"""

from __future__ import annotations

from collections.abc import Callable

from dpngd.files import write_atomically
from dpngd.suite import paths
from dpngd.suite.params import deviations, published


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


PAGES: dict[str, Callable[[], str]] = {"deviations.md": deviations_page}


def main() -> int:
    for name, page in PAGES.items():
        write_atomically(paths.ROOT / "docs" / name, page())
        print(f"docs/{name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
