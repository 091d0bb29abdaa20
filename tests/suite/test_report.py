"""The report: self-contained, every claim in it, and no gap where a figure should be."""

import html
import json
import re

import pytest
from PIL import Image

from dpngd.errors import UsageError
from dpngd.suite import claims, command, report, study
from dpngd.suite.store import ROOT

COMMITTED = ROOT / "figures" / "quick"


@pytest.fixture
def folder(tmp_path):
    """What two notebooks would leave."""
    for name in ("utility_table", "convergence"):
        Image.new("RGB", (4, 4), "white").save(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
        (tmp_path / f"{name}.csv").write_text("a\n1\n")
    for notebook, name in (("01_utility_table", "utility_table"), ("02_convergence_curves", "convergence")):
        rows = [{**claims.decide(c, {}), "verdict": "reproduced", "ours": "+1.00 <b>points</b>", "n": 5}
                for c in claims.of_notebook(notebook)]
        entry = {"notebook": notebook, "profile": "quick", "claims": rows, "commit": "abc",
                 "figures": [{"name": name, "caption": f"Figure {name}", "png": f"{name}.png", "svg": f"{name}.svg"}],
                 "tables": [{"name": name, "caption": f"Table {name}", "columns": ["a"], "rows": [["1"]],
                             "csv": f"{name}.csv"}],
                 "compute": {"runs": 3, "seconds": 10.0, "keys": ["k1", "k2"], "hardware": ["a core"]}}
        (tmp_path / f"{notebook}.json").write_text(json.dumps(entry))
    return tmp_path


def test_every_claim_is_in_the_page_and_in_the_data(folder):
    page = report.write("quick", folder).read_text(encoding="utf-8")
    data = json.loads((folder / "claims.json").read_text(encoding="utf-8"))
    assert [c["id"] for c in data["claims"]] == [c.id for c in claims.CLAIMS]
    assert all(f'id="claim-{c.id}"' in page for c in claims.CLAIMS)
    words = {c["id"]: c["verdict"] for c in data["claims"]}
    assert words["best-everywhere"] == "reproduced"
    assert words["few-images"] == "not run", "its notebook left nothing"
    assert data["compute"]["runs"] == 2, "a run that two notebooks show is one run"


def test_the_table_begins_with_its_count(folder):
    report.write("quick", folder)
    data = json.loads((folder / "claims.json").read_text(encoding="utf-8"))
    count, _, *table = report.markdown(data).splitlines()
    asked = [c for c in claims.CLAIMS if c.question]
    there = [c.notebook in ("01_utility_table", "02_convergence_curves") for c in claims.CLAIMS if not c.question]
    assert count.startswith(f"The paper's {len(there)} claims: {sum(there)} reproduced, "
                            f"{len(there) - sum(there)} not run. {len(asked)} questions of ours: ")
    assert len(table) == 2 + len(claims.CLAIMS)


def test_the_page_fetches_nothing(folder):
    page = report.write("quick", folder).read_text(encoding="utf-8")
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)
    assert "@import" not in page
    assert "<script" not in page
    assert page.count('src="data:image/png;base64,') == 2
    for local in re.findall(r'href="([^"#]+)"', page):
        assert (folder / local).exists(), local


def test_it_is_made_for_phones_and_for_the_dark(folder):
    page = report.write("quick", folder).read_text(encoding="utf-8")
    assert 'name="viewport"' in page
    assert "prefers-color-scheme: dark" in page
    assert "@media (max-width" in page


def test_what_a_notebook_says_is_escaped(folder):
    assert "+1.00 &lt;b&gt;points" in report.write("quick", folder).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["convergence.png", "utility_table.svg", "utility_table.csv"])
def test_a_deleted_figure_or_table_is_an_error(folder, name):
    (folder / name).unlink()
    with pytest.raises(UsageError, match=re.escape(name)):
        report.write("quick", folder)


def test_an_empty_folder_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="no notebook's results"):
        report.write("quick", tmp_path)


def test_the_command_takes_a_profile():
    with pytest.raises(UsageError, match="profile"):
        command.report([])
    with pytest.raises(UsageError, match=r"unknown profile 'quik'.*did you mean 'quick'"):
        command.report(["quik"])


def test_the_shipped_quick_figures_are_whole():
    left = report.entries(COMMITTED)
    assert list(left) == list(study.NOTEBOOKS)
    report.check_files(left, COMMITTED)
    data = json.loads((COMMITTED / "claims.json").read_text(encoding="utf-8"))
    assert [c["id"] for c in data["claims"]] == [c.id for c in claims.CLAIMS]
    assert "not run" not in {c["verdict"] for c in data["claims"]}
    page = html.unescape((COMMITTED / "index.html").read_text(encoding="utf-8"))
    assert all(figure["caption"] in page for entry in left.values() for figure in entry["figures"])


def test_the_shipped_files_name_no_machine():
    for path in COMMITTED.iterdir():
        if path.suffix in (".json", ".html", ".csv", ".svg"):
            assert not re.search(r"(?<![\w.])/(work|tmp|home|root)/", path.read_text(encoding="utf-8")), path.name


def test_a_table_is_put_between_its_marks_and_nowhere_else(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("a\n<!-- claims:cpu -->\nold\n<!-- /claims -->\nb\n<!-- claims:quick -->\nq\n<!-- /claims -->\n")
    report.put_into_readme("cpu", "| new |", path)
    assert path.read_text() == path.read_text().replace("old", "")
    assert path.read_text().startswith("a\n<!-- claims:cpu -->\n| new |\n<!-- /claims -->\nb\n<!-- claims:quick -->\nq")
    with pytest.raises(UsageError, match="has no place for it"):
        report.put_into_readme("paper", "x", path)
