"""The report: self-contained, every claim in it, and no gap where a figure should be."""

import html
import json
import re

import pytest
from PIL import Image

from dpngd.errors import UsageError
from dpngd.suite import claims, command, paths, report, study
from dpngd.suite.store import Store

SHIPPED = paths.FIGURES / "cpu"


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
        entry = {"notebook": notebook, "profile": "quick", "claims": rows, "stamp": "abc",
                 "figures": [{"name": name, "caption": f"Figure {name}", "png": f"{name}.png", "svg": f"{name}.svg"}],
                 "tables": [{"name": name, "caption": f"Table {name}", "columns": ["a"], "rows": [["1"]],
                             "csv": f"{name}.csv"}],
                 "compute": {"runs": 3, "seconds": 10.0, "keys": ["k1", "k2"], "hardware": ["a core"]}}
        (tmp_path / f"{notebook}.json").write_text(json.dumps(entry))
    return tmp_path


def test_every_claim_is_in_the_page_and_in_the_data(folder):
    page = report.write_report("quick", folder).read_text(encoding="utf-8")
    data = json.loads((folder / "claims.json").read_text(encoding="utf-8"))
    assert [c["id"] for c in data["claims"]] == [c.id for c in claims.all_claims()]
    assert all(f'id="claim-{c.id}"' in page for c in claims.all_claims())
    words = {c["id"]: c["verdict"] for c in data["claims"]}
    assert words["best-everywhere"] == "reproduced"
    assert words["few-images"] == "not run", "its notebook left nothing"
    assert data["compute"]["runs"] == 2, "a run that two notebooks show is one run"


def test_the_table_begins_with_its_count(folder):
    report.write_report("quick", folder)
    data = json.loads((folder / "claims.json").read_text(encoding="utf-8"))
    count, _, *table = report.markdown(data).splitlines()
    asked = [c for c in claims.all_claims() if c.question]
    there = [c.notebook in ("01_utility_table", "02_convergence_curves") for c in claims.all_claims() if not c.question]
    assert count.startswith(f"The paper's {len(there)} claims: {sum(there)} reproduced, "
                            f"{len(there) - sum(there)} not run. {len(asked)} questions of ours: ")
    assert len(table) == 2 + len(claims.all_claims())


def test_the_page_fetches_nothing(folder):
    page = report.write_report("quick", folder).read_text(encoding="utf-8")
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)
    assert "@import" not in page
    assert "<script" not in page
    assert page.count('src="data:image/png;base64,') == 2
    for local in re.findall(r'href="([^"#]+)"', page):
        assert (folder / local).exists(), local


def test_it_is_made_for_phones_and_for_the_dark(folder):
    page = report.write_report("quick", folder).read_text(encoding="utf-8")
    assert 'name="viewport"' in page
    assert "prefers-color-scheme: dark" in page
    assert "@media (max-width" in page


def test_what_a_notebook_says_is_escaped(folder):
    assert "+1.00 &lt;b&gt;points" in report.write_report("quick", folder).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["convergence.png", "utility_table.svg", "utility_table.csv"])
def test_a_deleted_figure_or_table_is_an_error(folder, name):
    (folder / name).unlink()
    with pytest.raises(UsageError, match=re.escape(name)):
        report.write_report("quick", folder)


@pytest.mark.parametrize("name", ["../secret.png", "/etc/passwd", "a/b.svg", "javascript:alert(1)", "data:x.svg",
                                  "http://example.org/a.png", ".svg", "x.html", "a\n.png", None])
@pytest.mark.parametrize("field", ["png", "svg", "csv"])
def test_an_entry_names_plain_files_only(folder, name, field):
    path = folder / "01_utility_table.json"
    entry = json.loads(path.read_text())
    entry["tables" if field == "csv" else "figures"][0][field] = name
    path.write_text(json.dumps(entry))
    with pytest.raises(UsageError, match=r"only plain \.png, \.svg and \.csv"):
        report.write_report("quick", folder)


def test_a_figure_that_is_a_link_is_an_error(folder, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside") / "secret.png"
    outside.write_bytes((folder / "convergence.png").read_bytes())
    (folder / "convergence.png").unlink()
    (folder / "convergence.png").symlink_to(outside)
    with pytest.raises(UsageError, match=r"'convergence\.png'"):
        report.write_report("quick", folder)


def test_an_empty_folder_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="no notebook's results"):
        report.write_report("quick", tmp_path)


def test_the_command_takes_a_profile():
    with pytest.raises(UsageError, match="profile"):
        command.report([])
    with pytest.raises(UsageError, match=r"unknown profile 'quik'.*did you mean 'quick'"):
        command.report(["quik"])


def test_the_shipped_figures_are_whole():
    left = report.entries(SHIPPED)
    assert list(left) == list(study.ARTIFACTS)
    report.check_files(left, SHIPPED)
    data = json.loads((SHIPPED / "claims.json").read_text(encoding="utf-8"))
    assert [c["id"] for c in data["claims"]] == [c.id for c in claims.all_claims()]
    assert "not run" not in {c["verdict"] for c in data["claims"]}
    page = html.unescape((SHIPPED / "index.html").read_text(encoding="utf-8"))
    assert all(figure["caption"] in page for entry in left.values() for figure in entry["figures"])


def test_the_shipped_figures_are_those_of_the_shipped_results(tmp_path):
    """Stamped with the results, not with the work tree: who changes results/cpu.jsonl draws figures/cpu again."""
    store, left = Store("cpu", root=tmp_path), report.entries(SHIPPED)
    data = json.loads((SHIPPED / "claims.json").read_text(encoding="utf-8"))
    assert data["stamp"] == study.results_stamp("cpu", store, report.shown_keys(left))
    assert html.escape(data["stamp"]) in (SHIPPED / "index.html").read_text(encoding="utf-8")
    for notebook, entry in left.items():
        assert entry["stamp"] == study.results_stamp("cpu", store, entry["compute"]["keys"])
        for figure in entry["figures"]:
            assert entry["stamp"] in (SHIPPED / figure["svg"]).read_text(encoding="utf-8"), (notebook, figure["svg"])


def test_the_shipped_files_name_no_machine():
    for path in SHIPPED.iterdir():
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
