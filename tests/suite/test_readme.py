"""What only the README has: its numbers and its tables. Blocks and links of all pages: `test_pages`."""

import re
from pathlib import Path

from dpngd.audit import leaks
from dpngd.suite import pages, profiles, study

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_number_of_the_papers_runs_is_counted():
    (runs,) = re.findall(r"been run \(([\d,]+) runs, about", README)
    assert int(runs.replace(",", "")) == len(profiles.load("paper").all_configs())


def test_the_number_of_planted_leaks_is_counted():
    for page in ("README.md", "CHANGELOG.md"):
        (count,) = re.findall(r"(?:plants|finds) (\d+) (?:planted )?leaks", (ROOT / page).read_text())
        assert int(count) == len(leaks.leaks()), page


def test_it_shows_the_two_commands():
    assert {"figures", "test"} <= set(re.findall(r"^ *make ([a-z]+)", README, re.M))


def test_it_is_short():
    assert len(README.splitlines()) <= 150


def test_what_is_generated_is_in_step_with_the_results():
    assert pages.with_parts("README.md", README) == README, "make docs"


def test_every_notebook_has_its_question():
    assert list(pages.ASKS) == list(study.ARTIFACTS)
    assert all(f"](notebooks/{name}.ipynb)" in README for name in study.ARTIFACTS)


def test_until_there_is_a_test_run_the_readme_says_what_the_runs_are_of(monkeypatch):
    monkeypatch.setattr(pages.Store, "shipped", {})
    assert "No run is shipped yet." in pages.how_far({})
    records = {str(i): {"evaluated_on": "validation"} for i in range(1234)}
    monkeypatch.setattr(pages.Store, "shipped", records)
    compute = {"tests": {"there": 7, "planned": 2000}}
    said = pages.how_far(compute)
    assert "1,234 runs are shipped, all of them of the gate and the search" in said
    assert "2,000" not in said
    monkeypatch.setattr(pages.Store, "shipped", records | {"t": {"evaluated_on": "test"}})
    said = pages.how_far(compute)
    assert "7 of 2,000 planned runs on test sets are there" in said
    assert "1,234 runs of the gate and the search" in said
