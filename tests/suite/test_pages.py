"""README, docs and the other pages: every block runs, every link and file is there, what is generated is up to date.

A block that is not run has a comment before it that says why: see `page_blocks`.
"""

import re
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET

import page_blocks
import pytest
import yaml
from page_blocks import ROOT, blocks, name

import dpngd
from dpngd.__main__ import COMMANDS
from dpngd.suite import pages, params

PAGES = page_blocks.pages()
EACH = pytest.mark.parametrize("page", PAGES, ids=name)


def runnable(page):
    return [b for b in blocks(page.read_text(encoding="utf-8")) if b.kind != "text" and not b.excuse]


@pytest.mark.parametrize("page", [p for p in PAGES if runnable(p)], ids=name)
def test_every_block_runs(page, tmp_path):
    done = page_blocks.run(runnable(page), tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count("@@ block at line") == len(runnable(page))
    for accuracy in re.findall(r"^accuracy (0\.\d+)", done.stdout, re.M):
        assert float(accuracy) > 0.6, "what is shown as training learns; chance is 0.25 and less"
    for epsilon in re.findall(r"at epsilon (\d\.\d+)$", done.stdout, re.M):
        assert float(epsilon) <= 4.0


def test_the_readme_and_the_guide_show_a_training_that_is_checked():
    for page in (ROOT / "README.md", ROOT / "docs" / "optimizer.md"):
        assert 'print(f"accuracy' in "".join(b.text for b in runnable(page)), page


@EACH
def test_a_block_that_is_not_run_says_why(page):
    text = page.read_text(encoding="utf-8")
    excused = [b for b in blocks(text) if b.excuse]
    assert len(excused) == text.count("\n<!-- not run:"), "the comment is on a line of its own, right before its block"
    assert all(b.kind != "text" for b in excused), "only what would be run needs an excuse"
    for b in blocks(text):
        assert b.language in ("", "python", "sh", "text", "bibtex"), f"{name(page)}:{b.line}: which language is that?"


@EACH
def test_every_link_resolves(page):
    text = without_code(page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.is_relative_to(ROOT), f"{target} is outside of the repository"
        assert file.exists(), f"{name(page)} links to {target}"
        if anchor:
            assert file.suffix == ".md", target
            assert anchor in anchors(file), f"{name(page)} links to {target}, which has {sorted(anchors(file))}"


@EACH
def test_every_file_that_is_named_is_there(page):
    named = re.findall(r"`((?:dpngd|params|tests|docs|notebooks|results|\.ci|\.github)/[\w./-]+)`",
                       page.read_text(encoding="utf-8"))
    shipped = {f"results/{profile}.jsonl" for profile in params.profile_names()}  # not there until a profile is trained
    for path in named:
        assert (ROOT / path).exists() or path in shipped, f"{name(page)} names {path}"


@EACH
def test_no_page_shows_a_file_that_git_does_not_keep(page):
    linked = re.findall(r"\]\(((?!https?:|mailto:|#)[^)#\s]+)", without_code(page.read_text(encoding="utf-8")))
    if not linked:
        return
    paths = [(page.parent / t).resolve().relative_to(ROOT).as_posix() for t in linked]
    ignored = subprocess.run(["git", "check-ignore", *paths], cwd=ROOT, capture_output=True, text=True)
    if ignored.returncode == 128:
        pytest.skip("not a git checkout")
    assert ignored.stdout == ""


def without_code(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def anchors(file):
    """The anchors of a page's headings, as code hosts make them."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", without_code(file.read_text(encoding="utf-8")), re.M):
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        number = next(i for i in range(100) if (f"{slug}-{i}" if i else slug) not in found)
        found.add(f"{slug}-{number}" if number else slug)
    return found


def test_the_pages_name_every_command_and_no_other():
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"(?:^|`)\s*make ([a-z]+)", text, re.M)) <= targets
    named = {tuple(words.split()) for words in re.findall(
        r"(?:bin/|`|^(?: {4})?)dpngd ([a-z]+(?: (?:status|fetch|show|config|curvature|methods)\b)?)", text, re.M)}
    assert {words[0] for words in named} == set(COMMANDS)
    for words in sorted(named):
        done = subprocess.run([sys.executable, "-m", "dpngd", *words, "--help"], capture_output=True, text=True)
        assert done.returncode == 0, (words, done.stderr)
    assert "python -m dpngd." not in text, "modules are no commands"


def test_the_index_has_every_page():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", index))
    assert linked == {p.name for p in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert "docs/README.md" in (ROOT / "README.md").read_text(encoding="utf-8"), "the README leads there"


@pytest.mark.parametrize("page", pages.PAGES)
def test_what_is_generated_is_as_it_would_be_made_now(page):
    assert (ROOT / page).read_text(encoding="utf-8") == pages.PAGES[page](), "make docs"


def test_deviations_are_whole():
    rows = params.deviations()
    for row in rows:
        assert {"topic", "open", "take", "why"} <= set(row) <= {"topic", "open", "take", "why", "switch"}, row
        assert all(isinstance(text, str) and text.strip() for text in row.values()), row
    assert len({row["open"] for row in rows}) == len(rows), "one row per thing"
    assert "deviations" not in params.profile_names()


def test_switches_name_methods_and_fields_that_are_there():
    from dpngd.methods import METHODS
    from dpngd.training.config import FIELDS

    for row in params.deviations():
        for word in re.findall(r"dp-ngd[\w-]*", row.get("switch", "")):
            assert word in METHODS, row
        for word in re.findall(r"\b(?:lambda|eta|T|ema|C)\w*\b(?!/)", row.get("switch", "")):
            assert word in FIELDS, row


def test_the_pictures_of_the_docs_are_pictures():
    for path in (ROOT / "docs").glob("*.svg"):
        root = ET.parse(path).getroot()
        assert root.tag.endswith("svg")
        assert root.find("{http://www.w3.org/2000/svg}title").text, "for screen readers"
        for text in root.iter("{http://www.w3.org/2000/svg}text"):
            for module in re.findall(r"^[a-z_]+(?=,|$)", text.text if text.get("class") == "c" else ""):
                assert list((ROOT / "dpngd").rglob(f"{module}.py")), f"{path.name} names {module}"


def test_the_version_is_in_one_place():
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dynamic"] == ["version"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == dpngd.__version__
    latest = re.search(r"^## (\S+):", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)[1]
    assert latest == dpngd.__version__


# ---- The checks themselves -------------------------------------------------------------------------------------------

SAMPLE = """# A page

    dpngd show methods   # a comment

text, and a formula

    F = A (x) G

- an item

    of two paragraphs

<!-- not run: it would take an hour -->

```sh
dpngd bench
```

```python
print(1)
```
"""


def test_blocks_are_found_and_told_apart():
    found = blocks(SAMPLE)
    assert [(b.kind, b.line, b.excuse) for b in found] == [
        ("sh", 3, ""), ("text", 7, ""), ("sh", 16, "it would take an hour"), ("python", 20, "")]
    assert found[0].text == "dpngd show methods   # a comment"


def test_a_block_that_fails_is_seen(tmp_path):
    good, bad, after = blocks("```python\nx = 1\n```\n```sh\nfalse\n```\n```python\nprint(x)\n```\n")
    assert page_blocks.run([good, after], tmp_path / "a").stdout.splitlines()[-1] == "1"
    done = page_blocks.run([good, bad, after], tmp_path / "b")
    assert done.returncode == 1
    assert "the commands at line 5 failed" in done.stderr


def test_anchors_are_those_of_code_hosts(tmp_path):
    page = tmp_path / "x.md"
    page.write_text("# What is refused?\n## A `layer`, of your own\n## Twice\n## Twice\n```sh\n# no heading\n```\n")
    assert anchors(page) == {"what-is-refused", "a-layer-of-your-own", "twice", "twice-1"}
