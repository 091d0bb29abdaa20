"""The report: self-contained, every claim in it, and no gap where a figure should be."""

import html
import json
import re

import pytest
from PIL import Image

from dpngd.errors import UsageError
from dpngd.suite import claims, command, paths, plots, profiles, report, stats, story, study
from dpngd.suite.store import Store

SHIPPED = paths.FIGURES / "cpu"


@pytest.fixture
def folder(tmp_path):
    """What two notebooks would leave."""
    for name in ("utility_table", "convergence"):
        Image.new("RGB", (4, 4), "white").save(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
        for file in (f"{name}.csv", f"table_{name}.csv"):
            (tmp_path / file).write_text("a\n1\n")
    for notebook, name in (("01_utility_table", "utility_table"), ("02_convergence_curves", "convergence")):
        rows = [{**claims.decide(c, {}), "word": "reproduced", "ours": "+1.00 <b>points</b>",
                 "brief": "+1.00 <b>points</b>", "n": 5}
                for c in claims.of_notebook(notebook)]
        entry = {"notebook": notebook, "profile": "quick", "claims": rows, "stamp": "abc",
                 "figures": [{"name": name, "caption": f"Figure {name}", "png": f"{name}.png", "svg": f"{name}.svg",
                              "csv": f"{name}.csv"}],
                 "tables": [{"name": name, "caption": f"Table {name}", "columns": ["a"], "rows": [["1"]],
                             "csv": f"table_{name}.csv"}],
                 "compute": {"runs": 3, "seconds": 10.0, "keys": ["k1", "k2"], "hardware": ["a core"]}}
        (tmp_path / f"{notebook}.json").write_text(json.dumps(entry))
    return tmp_path


def test_every_claim_is_in_the_page_and_in_the_data(folder):
    page = report.write_report("quick", folder).read_text(encoding="utf-8")
    data = json.loads((folder / "claims.json").read_text(encoding="utf-8"))
    assert [c["id"] for c in data["claims"]] == [c.id for c in claims.all_claims()]
    assert all(f'id="claim-{c.id}"' in page for c in claims.all_claims())
    words = {c["id"]: c["word"] for c in data["claims"]}
    assert data["edition"] == claims.EDITION
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
    assert len({row.count("|") for row in table}) == 1


def test_a_demonstration_says_so(folder):
    page = report.write_report("quick", folder).read_text(encoding="utf-8")
    assert "<b>A demonstration only</b>" in page
    (folder / "01_utility_table.json").unlink()
    assert "<b>A demonstration only</b>" not in report.write_report("cpu", folder).read_text(encoding="utf-8")


def test_the_words_and_rules_are_in_the_page(folder):
    page = report.write_report("quick", folder).read_text(encoding="utf-8")
    for name in ("superior", "hardly", "at_least", "mostly", "conjunction"):
        assert name in report.rule_table()
        assert f"<td>{name}:" in page
    assert set(dict(report.tally([]))) == set(stats.WORDS)
    shown = dict(report.tally([{"word": "demonstration only"}]))
    assert shown["demonstration only"] == 1


def test_claims_of_another_edition_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "FIGURES", tmp_path)
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "claims.json").write_text(json.dumps({"claims": [{"verdict": "reproduced"}]}))
    with pytest.raises(UsageError, match=r"claims\.json is of another edition: run dpngd run --profile cpu"):
        command.report(["cpu", "--markdown"])
    assert {c["word"] for c in report.current("cpu")["claims"]} == {"not run"}


def test_docs_say_what_each_claim_says(tmp_path, monkeypatch):
    """Word, numbers, power and what would decide it, as claims.json has them."""
    monkeypatch.setattr(paths, "FIGURES", tmp_path)
    rows = [claims.decide(c, {}) for c in claims.all_claims()]
    rows[4] |= {"word": "inconclusive", "fragile": True, "n": 8, "images": 10000, "power": 0.5, "unit": " points",
                "said": "Inconclusive: +0.2 [-0.1, 0.5] points (n = 8 seeds, 10,000 test images).",
                "power_said": "With n = 8 a difference of 0.50 points is seen with 80 % power.",
                "would_decide": "What would decide it: about 20 seeds.", "brief": "+0.2 [-0.1, 0.5] points"}
    (tmp_path / "cpu").mkdir()
    data = {"edition": claims.EDITION, "stamp": "abc", "claims": rows}
    (tmp_path / "cpu" / "claims.json").write_text(json.dumps(data))
    text = report.docs("cpu")
    assert "| +0.2 [-0.1, 0.5] points | 8 | 0.50 points | **inconclusive (fragile)** | 01 |" in text
    assert "(n = 8 seeds, 10,000 test images). With n = 8 a difference of 0.50 points is seen with 80 % power. What " \
           "would decide it: about 20 seeds." in text
    assert all(f"| {c.sentence} |" in text for c in claims.all_claims())
    assert f"- **{rows[4]['sentence']}**" in text, "what was decided is told in full"
    assert f"- {len(rows) - 1} claims are not run" in text


def test_docs_claims_is_what_the_command_writes():
    """Who redraws figures/cpu also writes docs/claims.md again: dpngd report cpu --docs."""
    assert (paths.ROOT / "docs" / "claims.md").read_text(encoding="utf-8") == report.docs("cpu")


def test_claims_are_grouped_the_papers_first_and_ours_folded(folder):
    page = report.write_report("quick", folder).read_text(encoding="utf-8")
    for notebook, papers, ours in report.grouped(json.loads((folder / "claims.json").read_text())["claims"]):
        places = [page.index(f'id="claim-{c["id"]}"') for c in (*papers, *ours)]
        assert places == sorted(places), notebook
        if ours:
            start = page.rindex('<details class="ours">', 0, places[len(papers)])
            assert page.index("</details>\n", places[-1]) > start > (places[len(papers) - 1] if papers else 0)


def test_a_claim_links_to_its_figure(folder):
    page = report.write_report("quick", folder).read_text(encoding="utf-8")
    linked = report.anchors(report.entries(folder))
    assert linked["every-budget"] == "figure-convergence"
    assert linked["step-cost-bench"] == "bench"
    assert "few-images" not in linked, "its figure is not there"
    assert all(f'id="{anchor}"' in page and f'href="#{anchor}"' in page for anchor in linked.values())
    assert {i: report.shown_in(c) for c in claims.all_claims() if (i := c.id) in ("stricter-larger", "total-time")} == {
        "stricter-larger": "lead", "total-time": "time_to_peak"}
    names = {"", "lead", "lead_between", "lead_by_mean", "theorem", "privacy", "bench", "time_to_peak",
             *(a for group in study.ARTIFACTS.values() for a in group)}
    assert {report.shown_in(c) for c in claims.all_claims()} <= names


def test_the_abstract_of_a_demonstration_has_no_verdict(folder):
    for path in folder.glob("0*.json"):
        entry = json.loads(path.read_text())
        entry["claims"] = [{**row, "word": "demonstration only", "held": None} for row in entry["claims"]]
        path.write_text(json.dumps(entry))
    report.write_report("quick", folder)
    said = json.loads((folder / "claims.json").read_text(encoding="utf-8"))["abstract"]
    assert len(said) == 5
    assert said[0].endswith("and decide none.")
    assert not re.search("reproduced|refuted|equivalent|inconclusive|None", " ".join(said))


def test_the_abstract_has_five_sentences_of_the_claims(folder):
    (folder / "claims.json").unlink(missing_ok=True)
    report.write_report("cpu", folder)
    data = json.loads((folder / "claims.json").read_text(encoding="utf-8"))
    rows = {row["id"]: row for row in data["claims"]}
    rows["best-everywhere"] |= {"word": "inconclusive", "fragile": True, "held": 3, "cells": 15, "unit": " points",
                                "parts": [{"name": n, "estimate": e} for n, e in (("a", 0.5), ("b", -1.0),
                                                                                  ("c", None))]}
    rows["exponent"]["word"] = "refuted"
    said = report.abstract(data)
    assert len(said) == 5
    assert all(s.endswith(".") for s in said)
    assert "DP-NGD leads the best baseline in 1 of 2 cells (-1.00 to +0.50 points); in 3 the lead is significant " \
           "after correction. That it is more accurate than every baseline in every cell is **inconclusive " \
           "(fragile)**. The advantage is larger under stricter privacy: **reproduced**" in said[1]
    rows["exponent"]["brief"] = "-1.4 points"
    said = report.abstract(data)
    assert said[3].startswith("Refuted here: “The exponent p hardly matters” (-1.4 points); 1 is inconclusive")
    rows["best-everywhere"]["word"] = "refuted"
    assert report.abstract(data)[3].startswith("Also refuted here: “The exponent p hardly matters” (-1.4 points)")
    rows["exponent"]["word"] = "equivalent"
    assert report.abstract(data)[3].startswith("No other claim of the paper is refuted here; there is no difference")
    rows["best-everywhere"]["word"] = "inconclusive"
    assert report.abstract(data)[3].startswith(
        "No claim of the paper is refuted here; there is no difference of 1 point or more where it says “The exponent "
        "p hardly matters”; 1 is inconclusive")


def test_a_figure_lists_the_claims_that_it_shows(folder):
    page = report.write_report("cpu", folder).read_text(encoding="utf-8")
    figure = page[page.index('<figure id="figure-convergence">'):]
    figure = figure[:figure.index("</figure>")]
    rows = [c for c in claims.all_claims() if report.shown_in(c) == "convergence"]
    assert all(f'<a href="#claim-{c.id}">{html.escape(c.sentence)}</a>' in figure.replace("&#39;", "&#x27;")
               for c in rows)
    assert 'alt="Figure convergence. +1.00' in figure


def test_the_page_begins_with_what_was_run(folder):
    page = report.write_report("cpu", folder).read_text(encoding="utf-8")
    assert page.index("DP-NGD clips and adds noise after whitening") < page.index("What was found")
    assert "with four baselines on three data sets, at five privacy budgets with eight seeds each" in page
    assert report.compact([1, 2, 3, 5]) == "1 to 3, 5"


def test_a_page_without_all_runs_says_so_at_the_top(folder):
    page = report.write_report("cpu", folder).read_text(encoding="utf-8")
    found = json.loads((folder / "claims.json").read_text(encoding="utf-8"))["compute"]
    assert found["there"] < found["planned"]
    top = page[:page.index('id="claims"')]
    assert f"{found['there']:,} of {found['planned']:,} planned runs are there" in top
    assert "<b>Not complete</b>" in top


@pytest.mark.parametrize("word", ["reproduced", "not run"])
def test_the_one_picture_is_at_the_top_once_its_claim_is_decided(folder, word):
    path = folder / "01_utility_table.json"
    entry = json.loads(path.read_text())
    entry["figures"][0]["name"] = "lead"
    entry["claims"] = [{**row, "word": word} for row in entry["claims"]]
    path.write_text(json.dumps(entry))
    page = report.write_report("cpu", folder).read_text(encoding="utf-8")
    assert page.count('id="figure-lead"') == 1
    assert ('id="figure-lead"' in page[:page.index('id="claims"')]) == (word == "reproduced")


def part(data, epsilon, rival, n):
    return {"name": f"{data} ε={epsilon} over {rival}", "n": n}


def test_the_one_picture_is_preliminary_as_soon_as_one_data_set_is_complete():
    def said(*parts, word="not run"):
        return report.preliminary({"word": word, "parts": parts}, 8)

    cifar, svhn = (part("cifar10", 1, m, 8) for m in ("dp-sgd", "gep")), part("svhn", 1, "dp-sgd", 8)
    cifar = list(cifar)
    assert said(*cifar, svhn, part("svhn", 2, "dp-sgd", 3)) == "Preliminary: 2 of 3 cells. "
    assert said(cifar[0], part("cifar10", 1, "gep", 7), svhn, part("svhn", 2, "dp-sgd", 0)) is None
    assert said() is None
    assert said(*cifar, word="inconclusive") == ""


def test_its_caption_says_so(folder):
    path = folder / "01_utility_table.json"
    entry = json.loads(path.read_text())
    entry["figures"][0]["name"] = "lead"
    seeds = len({c.seed for c in profiles.load("cpu").configs("utility_table")})
    for row in entry["claims"]:
        row |= {"word": "not run"} | ({"parts": [
            {**part("cifar10", 1, "gep", seeds), "word": "not run", "estimate": 1.0, "low": 0.0, "high": 2.0}]}
            if row["id"] == "best-everywhere" else {})
    path.write_text(json.dumps(entry))
    page = report.write_report("cpu", folder).read_text(encoding="utf-8")
    assert page.count('id="figure-lead"') == 1
    assert "Preliminary: 1 of 1 cells. Figure utility_table" in page[:page.index('id="claims"')]
    assert f'href="{entry["figures"][0]["csv"]}"' in page


def test_the_protocols_commit_is_kept_with_the_results(folder, monkeypatch, tmp_path):
    page = report.write_report("quick", folder).read_text(encoding="utf-8")
    data = json.loads((folder / "claims.json").read_text(encoding="utf-8"))
    fixed = {"first": "abc1234", "fixed": "2026-01-02", "last": "def5678", "changed": "2026-03-04"}
    entry = json.dumps({**data, "protocol": fixed})
    (folder / "claims.json").write_text(entry)
    monkeypatch.setattr(report, "git", lambda *words: ["1111111 2026-05-06", "2222222 2026-01-02"] if "log" in words
                        else ["false"])
    page = report.write_report("quick", folder).read_text(encoding="utf-8")
    assert "committed with <code>2222222</code> on 2026-01-02" in page, "the whole history knows better"
    assert "<code>1111111</code>" in page
    (folder / "claims.json").write_text(entry)
    monkeypatch.setattr(report, "git", lambda *words: ["1111111 2026-05-06"] if "log" in words else ["true"])
    page = report.write_report("quick", folder).read_text(encoding="utf-8")
    assert "committed with <code>abc1234</code> on 2026-01-02" in page, "of a part of the history the results keep it"
    assert "<code>def5678</code>" in page
    monkeypatch.undo()
    monkeypatch.setattr(report.subprocess, "run", lambda *a, **k: (_ for _ in ()).throw(OSError("no git")))
    page = report.write_report("quick", folder).read_text(encoding="utf-8")
    assert "<code>def5678</code>" in page, "and without git"
    (folder / "claims.json").unlink()
    page = report.write_report("quick", folder).read_text(encoding="utf-8")
    assert "no commit of docs/protocol.md is known here" in page
    assert json.loads((folder / "claims.json").read_text(encoding="utf-8"))["protocol"] is None


def test_bold_is_the_only_markup():
    assert story.bold_html("a **b** <i>") == "a <b>b</b> &lt;i&gt;"


def test_the_page_fetches_nothing(folder):
    page = report.write_report("quick", folder).read_text(encoding="utf-8")
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)
    assert "@import" not in page
    assert "<script" not in page
    assert page.count('src="data:image/png;base64,') == 3, "two figures and the audit's canary"
    for local in re.findall(r'href="([^"#]+)"', page):
        assert (folder / local).exists(), local


def test_it_is_made_for_phones_and_for_the_dark(folder):
    page = report.write_report("quick", folder).read_text(encoding="utf-8")
    assert 'name="viewport"' in page
    assert "prefers-color-scheme: dark" in page
    assert "@media (max-width" in page


def test_what_a_notebook_says_is_escaped(folder):
    assert "+1.00 &lt;b&gt;points" in report.write_report("quick", folder).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["convergence.png", "utility_table.svg", "utility_table.csv",
                                  "table_utility_table.csv"])
def test_a_deleted_figure_or_table_is_an_error(folder, name):
    (folder / name).unlink()
    with pytest.raises(UsageError, match=re.escape(name)):
        report.write_report("quick", folder)


@pytest.mark.parametrize("name", ["../secret.png", "/etc/passwd", "a/b.svg", "javascript:alert(1)", "data:x.svg",
                                  "http://example.org/a.png", ".svg", "x.html", "a\n.png", None])
@pytest.mark.parametrize(("part", "field"), [("figures", "png"), ("figures", "svg"), ("figures", "csv"),
                                             ("tables", "csv")])
def test_an_entry_names_plain_files_only(folder, name, part, field):
    path = folder / "01_utility_table.json"
    entry = json.loads(path.read_text())
    entry[part][0][field] = name
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


def test_entries_of_another_edition_are_an_error(folder):
    path = folder / "01_utility_table.json"
    entry = json.loads(path.read_text())
    entry["claims"] = [{"id": row["id"], "verdict": "reproduced"} for row in entry["claims"]]
    path.write_text(json.dumps(entry))
    with pytest.raises(UsageError, match=r"01_utility_table\.json is of another edition: run dpngd run"):
        report.write_report("quick", folder)


def test_an_empty_folder_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="no notebook's results"):
        report.write_report("quick", tmp_path)


def test_the_command_takes_a_profile():
    with pytest.raises(UsageError, match="profile"):
        command.report([])
    with pytest.raises(UsageError, match=r"unknown profile 'quik'.*did you mean 'quick'"):
        command.report(["quik"])


def shipped():
    """figures/cpu/claims.json, where it has been drawn under this edition's rules."""
    path = SHIPPED / "claims.json"
    data = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if data.get("edition") != claims.EDITION:
        pytest.skip("figures/cpu is of another edition, or not drawn: run_all.py --profile cpu draws it")
    return data


def test_the_shipped_figures_are_whole():
    data, left = shipped(), report.entries(SHIPPED)
    assert list(left) == list(study.ARTIFACTS)
    report.check_files(left, SHIPPED)
    assert [c["id"] for c in data["claims"]] == [c.id for c in claims.all_claims()]
    assert all(c["word"] == stats.NOT_RUN for c in data["claims"] if c["runs"] < c["planned"]), "decided when complete"
    page = html.unescape((SHIPPED / "index.html").read_text(encoding="utf-8"))
    assert all(figure["caption"] in page for entry in left.values() for figure in entry["figures"])


def test_the_shipped_figures_are_those_of_the_shipped_results(tmp_path):
    """Stamped with the results, not with the work tree: who changes results/cpu.jsonl draws figures/cpu again."""
    data, store, left = shipped(), Store("cpu", root=tmp_path), report.entries(SHIPPED)
    assert data["stamp"] == study.results_stamp("cpu", store, report.shown_keys(left))
    assert html.escape(data["stamp"]) in (SHIPPED / "index.html").read_text(encoding="utf-8")
    for notebook, entry in left.items():
        mine = Store(study.store_of(notebook, "cpu"), root=tmp_path)
        assert entry["stamp"] == study.results_stamp("cpu", mine, entry["compute"]["keys"])
        for figure in entry["figures"]:
            bare = figure["name"] == "floor_by_rank"  # measured live, of no run
            stamp = ">dpngd, profile cpu<" if bare else entry["stamp"]
            assert stamp in (SHIPPED / figure["svg"]).read_text(encoding="utf-8"), (notebook, figure["svg"])


def test_the_shipped_results_stay_small():
    for path in (paths.ROOT / "results").glob("*"):
        assert path.stat().st_size < 20e6, path.name


def test_the_shipped_folder_has_no_file_of_an_earlier_drawing():
    left = report.entries(SHIPPED)
    if not left:
        pytest.skip("figures/cpu is not drawn")
    named = {"index.html", "claims.json", "audit.csv", "audit_self_test.csv", "audit_canary.png", "audit_canary.svg",
             "audit_canary.csv", "bench_ratios.csv", "bench_seconds.csv"}
    named |= {f"{notebook}.{kind}" for notebook in left for kind in ("json", "ipynb", "html")}
    named |= {figure[kind] for entry in left.values() for figure in entry["figures"] for kind in plots.FILES
              if kind in figure}
    named |= {table["csv"] for entry in left.values() for table in entry["tables"]}
    assert {path.name for path in SHIPPED.iterdir()} <= named


def test_the_shipped_files_name_no_machine():
    for path in SHIPPED.iterdir():
        if path.suffix in (".json", ".html", ".csv", ".svg"):
            assert not re.search(r"(?<![\w.])/(work|tmp|home|root)/", path.read_text(encoding="utf-8")), path.name
