"""requirements.lock is requirements.txt with hashes."""

import re

from dpngd.suite import lock, paths

ROOT = paths.ROOT


def pins(text):
    found = re.findall(r"^([A-Za-z0-9_.-]+)==([^\s\\]+)", text, flags=re.MULTILINE)
    return {name.lower().replace("_", "-"): version for name, version in found}


def test_every_pin_is_locked_with_a_hash():
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    wanted, held = pins((ROOT / "requirements.txt").read_text(encoding="utf-8")), pins(text)
    assert {name: held.get(name) for name in wanted} == wanted, "requirements.txt changed: make lock"
    assert len(re.findall(r"^    --hash=sha256:[0-9a-f]{64}$", text, flags=re.MULTILINE)) == len(held)
    assert not re.search(r"https?://|file:", text), "no index is named"


def test_a_report_becomes_a_lock():
    def item(name, version, digest):
        return {"metadata": {"name": name, "version": version}, "download_info": {
            "url": "file:///somewhere", "archive_info": {"hashes": {"sha256": digest}}}}

    text = lock.locked({"install": [item("torch", "2.13.0+cpu", "b" * 64), item("Jinja2", "3.1.6", "a" * 64)]})
    assert text == lock.HEADER + (f"jinja2==3.1.6 \\\n    --hash=sha256:{'a' * 64}\n"
                                  f"torch==2.13.0 \\\n    --hash=sha256:{'b' * 64}\n")
