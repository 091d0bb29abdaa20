"""The blocks of a Markdown page as a reader would run them: which there are, and what they print.

    ```python              run, in one process per page, one block after the other
    ```sh                  run by bash, at its place among them
    four spaces            the same as ```sh where a line begins with a command; else text
    <!-- not run: why -->  before a block: it is not run, and the page says why
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"\s*(\.venv/bin/|dpngd |make |python |pip |npm |git |jupyter )")
NOT_RUN = re.compile(r"<!-- not run: (\S.*) -->")


@dataclass(frozen=True)
class Block:
    line: int  # of its first line of code, from 1
    language: str  # "" for an indented block
    text: str
    excuse: str  # why it is not run

    @property
    def kind(self):
        """"python", "sh", or "text"."""
        if self.language in ("python", "sh"):
            return self.language
        command = any(COMMAND.match(line) for line in self.text.splitlines())
        return "sh" if command and not self.language else "text"


def pages():
    """Every page that people read."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def name(page):
    return page.relative_to(ROOT).as_posix()


def blocks(text):
    """The code blocks of a page, fenced and indented."""
    found, lines, i, excuse = [], text.splitlines(), 0, ""
    while i < len(lines):
        line = lines[i]
        if line.startswith("```"):
            end = next(j for j in range(i + 1, len(lines)) if lines[j].startswith("```"))
            found.append(Block(i + 2, line[3:].strip(), "\n".join(lines[i + 1 : end]), excuse))
            i, excuse = end, ""
        elif line.startswith("    ") and line.strip() and not lines[i - 1].strip() and not in_list(lines, i):
            end = i
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            found.append(Block(i + 1, "", "\n".join(row[4:] for row in lines[i:end]).rstrip(), excuse))
            i, excuse = end - 1, ""
        elif said := NOT_RUN.fullmatch(line):
            excuse = said[1]
        elif line.strip():
            excuse = ""
        i += 1
    return found


def in_list(lines, i):
    """Whether an indented line belongs to an item of a list."""
    above = next((row for row in reversed(lines[:i]) if row.strip() and not row.startswith(" ")), "")
    return bool(re.match(r"([-*+]|\d+\.) ", above))


DRIVER = """
import json, subprocess, sys
names = {"__name__": "__main__"}
for line, kind, text in json.load(open(sys.argv[1])):
    print(f"@@ block at line {line}", flush=True)
    if kind == "python":
        exec(compile(text, f"block at line {line}", "exec"), names)
        sys.stdout.flush()
    elif subprocess.run(["bash", "-euo", "pipefail", "-c", text]).returncode:
        sys.exit(f"the commands at line {line} failed")
"""


def run(page_blocks, folder, timeout=900):
    """Run blocks in an empty folder, in which .venv/bin/dpngd, dpngd and run_all.py are this checkout's."""
    python = f"exec {sys.executable!s} -W ignore"
    for place in (folder / ".venv" / "bin", folder / "bin"):
        place.mkdir(parents=True)
        for program, call in (("dpngd", f'{python} -m dpngd "$@"'), ("python", f'{python} "$@"')):
            (place / program).write_text(f"#!/bin/sh\n{call}\n")
            (place / program).chmod(0o755)
    (folder / "run_all.py").symlink_to(ROOT / "run_all.py")
    (folder / "data").mkdir()
    listed = folder / "blocks.json"
    listed.write_text(json.dumps([(b.line, b.kind, b.text) for b in page_blocks]))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
           "DPNGD_DATA": str(folder / "data"), "DPNGD_STORE": str(folder / "store"), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-W", "ignore", "-c", DRIVER, listed], capture_output=True, text=True,
                          env=env, cwd=folder, timeout=timeout)
