"""Every number of the paper that we quote is in the paper, and none of its accuracies is left out."""

import re
from collections import Counter

import pytest

from dpngd.suite import paths
from dpngd.suite.params import published

TEX = paths.ROOT.parent / "shared" / "paper" / "dp-ngd.tex"
ROWS = {"DP-SGD": "dp-sgd", "DP-SGD-PT": "dp-sgd-pt", "GEP": "gep", "AdaDPS": "adadps", "DP-NGD": "dp-ngd"}


@pytest.fixture(scope="module")
def tex():
    if not TEX.exists():
        pytest.skip("the paper's LaTeX source is not here (../shared/paper/dp-ngd.tex)")
    return re.sub(r"\s+", " ", TEX.read_text())


def table(tex, label):
    """The text from a table's label to its end."""
    return tex.split(rf"\label{{{label}}}")[1].split(r"\end{table")[0]


def percentages(text):
    return [float(x) for x in re.findall(r"(\d+\.\d+)\\%", text)]


def entries(values, path=""):
    """All (path, mapping) pairs in nested values."""
    if isinstance(values, dict):
        yield path, values
        for key, value in values.items():
            yield from entries(value, f"{path}.{key}")
    elif isinstance(values, list):
        for i, value in enumerate(values):
            yield from entries(value, f"{path}[{i}]")


def numbers(values):
    if isinstance(values, dict):
        return [n for v in values.values() for n in numbers(v)]
    if isinstance(values, list):
        return [n for v in values for n in numbers(v)]
    return [float(values)] if isinstance(values, int | float) and not isinstance(values, bool) else []


def test_table_2_is_the_papers(tex):
    ours, found = published()["utility_table"], Counter()
    data = None
    for line in table(tex, ours["label"]).split(r"\\"):
        if name := re.search(r"\{(CIFAR-10|SVHN|UTKFace)\}", line):
            data = name[1].lower().replace("-", "")
        method = re.search(r"\{(?:\\textbf\{)?(DP-SGD-PT|DP-SGD|GEP|AdaDPS|DP-NGD)", line)
        if method and data:
            method = ROWS[method[1]]
            assert percentages(line) == ours["mean"][data][method]
            assert [float(x) for x in re.findall(r"\$\\pm\$(\d\.\d+)", line)] == ours["sd"][data][method]
            found[data] += 1
    assert found == {"cifar10": 5, "svhn": 5, "utkface": 5}


@pytest.mark.parametrize("name", ["ablation_decoupling", "ablation_clipping"])
def test_tables_3_and_4_are_the_papers(tex, name):
    ours = published()[name]
    assert percentages(table(tex, ours["label"])) == numbers(list(ours["mean"].values()))


def test_table_5_is_the_papers(tex):
    ours = published()["overhead"]
    text = table(tex, ours["label"])
    rows = re.findall(r"& (?:\\textbf\{)?DP-[A-Z-]+\}? & ([^\\]*?(?:\\textbf[^\\]*)*) \\\\", text)
    assert [[float(x) for x in re.findall(r"\d+(?:\.\d+)?", row)] for row in rows] == [row[3:] for row in ours["rows"]]


def test_table_6_is_the_papers(tex):
    text = table(tex, "tab:sensitivity")
    values = re.findall(r"Value & (.*?) \\\\ Accuracy & (.*?) \\\\", text)
    assert len(values) == 3
    for (row, accuracies), axis in zip(values, published()["robustness"]["axes"].values(), strict=True):
        assert [float(x) for x in re.findall(r"\d+(?:\.\d+)?", row)] == axis["values"]
        assert percentages(accuracies) == axis["mean"]


def test_appendix_b_is_the_papers(tex):
    rows = re.findall(r"& (\d\.0) & (\d+) & (0\.\d+) \\\\", table(tex, "tab:optimal_configs"))
    ours = published()["optimal_configs"]
    flat = [
        (e, T, eta)
        for data in ours["T"]
        for e, T, eta in zip(ours["epsilons"], ours["T"][data], ours["eta"][data], strict=True)
    ]
    assert [(float(e), int(T), float(eta)) for e, T, eta in rows] == flat


def test_every_quote_is_in_the_paper_and_holds_its_number(tex):
    quotes = [(path, e) for path, e in entries(published()) if "quote" in e]
    assert len(quotes) > 50
    for path, entry in quotes:
        assert entry["quote"] in tex, f"{path}: not in the paper: {entry['quote']}"
        if "10^{-5}" in entry["quote"]:
            continue
        held = [float(x) for x in re.findall(r"\d+(?:\.\d+)?", entry["quote"])]
        assert set(numbers(entry["value"])) <= set(held), path


def test_no_accuracy_of_the_paper_is_left_out(tex):
    body = tex.split(r"\begin{document}")[-1]
    assert set(percentages(body)) <= set(numbers(published()))
    in_text = {float(x) for x in re.findall(r"\$(\d\d\.\d\d)\\%\$", body)}
    assert len(in_text) > 10
    assert in_text <= set(numbers(published()))


def test_the_papers_arithmetic():
    """What the text derives from its tables, so that a typing error of ours shows without the source too."""
    table_2 = published()["utility_table"]
    for entry in table_2["text"]:
        at = table_2["epsilons"].index(entry["epsilon"])
        rows = {m: row[at] for m, row in table_2["mean"][entry["data"]].items()}
        lead = rows.pop("dp-ngd") - max(rows.values())
        below = entry["name"] == "lead below"
        assert lead < entry["value"] if below else lead == pytest.approx(entry["value"])
    for *_, seconds, steps, hours in published()["overhead"]["rows"]:
        assert seconds * steps / 3600 == pytest.approx(hours, abs=0.006)
    assert all(len({str(v["value"]) for v in i["versions"]}) > 1 for i in published()["inconsistencies"])
    assert all("place" in section for name, section in published().items() if name not in ("paper", "inconsistencies"))
