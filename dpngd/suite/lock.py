"""Write requirements.lock: every package that requirements.txt brings, with the hash of its file.

    make lock

pip resolves without installing, and reports what it would install and the SHA-256 of each file. A lock is for one
platform: this one is for Linux on x86-64, Python 3.11 and the CPU build of torch, the setting in which results/ were
made. Elsewhere install requirements.txt: a hash for every file of every platform would still not fit, because other
builds of torch bring other packages.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

HEADER = """\
# Written by `make lock` from requirements.txt: every package and the SHA-256 of its file.
#     pip install --require-hashes -r requirements.lock
# For Linux on x86-64, Python 3.11 and the CPU build of torch (give pip PyTorch's CPU index, or its wheel).
# It does not serve elsewhere: pip checks the hash of the very file it installs, and torch for GPUs or other systems
# is another file and brings other packages. There, install requirements.txt, which pins versions without hashes.
"""


def locked(report: dict) -> str:
    """The lock from pip's installation report."""
    rows = []
    for item in report["install"]:
        name, version = item["metadata"]["name"].lower().replace("_", "-"), item["metadata"]["version"]
        digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
        rows.append(f"{name}=={version.partition('+')[0]} \\\n    --hash=sha256:{digest}\n")
    return HEADER + "".join(sorted(rows))


def main(requirements: str = "requirements.txt", lock: str = "requirements.lock") -> int:
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed",
                        "--report", str(report), "-r", requirements], check=True)
        text = locked(json.loads(report.read_text(encoding="utf-8")))
    Path(lock).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
