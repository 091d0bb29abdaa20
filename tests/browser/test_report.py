"""The shipped report, and one of made-up results, in a browser: wide and narrow, light and dark, printed, and read by
a machine that judges access.

Only properties are checked, no texts, so that the page can be redesigned. What it must keep:
    #claim-<id>     one element per claim of claims.json, with the claim's word in it
    .tally li       how often each word was reached among the paper's claims: a number and the word
"""

import itertools
import json
import re
from collections import Counter

import made_results
import pytest

from dpngd.suite import paths, report

WIDTHS = pytest.mark.parametrize("width", [1280, 390])
SCHEMES = pytest.mark.parametrize("scheme", ["light", "dark"])


def word(claim):
    return claim.get("word") or claim["verdict"]


@pytest.fixture(scope="module", params=["shipped", "made"])
def folder(request, browser, tmp_path_factory):
    """figures/cpu, and a folder like it with every claim decided, whatever is shipped."""
    if request.param == "shipped":
        yield paths.FIGURES / "cpu"
        return
    made = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "RESULTS", made / "results", raising=False)
        patch.setattr(paths, "STORE", made / "store", raising=False)
        made_results.write("cpu", made / "results")
        made_results.draw("cpu", made / "cpu", ["00_geometry", "01_utility_table", "04_ablations"])
        report.write_report("cpu", made / "cpu")
    yield made / "cpu"


@pytest.fixture
def claims(folder):
    return json.loads((folder / "claims.json").read_text(encoding="utf-8"))["claims"]


@WIDTHS
def test_the_page_does_not_scroll_sideways(open_page, folder, width):
    page = open_page((folder / "index.html").as_uri(), width)
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    wide = page.evaluate("""width => [...document.querySelectorAll('body *')].filter(e => {
        for (let p = e; p; p = p.parentElement)
            if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(p).overflowX)) return false;
        return e.getBoundingClientRect().right > width + 1}).map(e => e.outerHTML.slice(0, 120))""", width)
    assert wide == [], "what is wider than the screen scrolls inside its own box"


@WIDTHS
def test_nothing_is_fetched_and_every_image_loads(open_page, folder, width):
    page = open_page((folder / "index.html").as_uri(), width)
    assert page.evaluate("document.images.length") > 0
    assert page.evaluate("[...document.images].filter(i => !i.complete || !i.naturalWidth).length") == 0
    assert page.evaluate("[...document.images].filter(i => !i.alt.trim()).length") == 0
    assert page.complaints == []
    assert page.evaluate("performance.getEntriesByType('resource').map(r => r.name).filter("
                         "n => !n.startsWith('data:'))") == []


def test_every_link_leads_somewhere(open_page, folder):
    page = open_page((folder / "index.html").as_uri())
    links = page.evaluate("[...document.links].map(a => a.getAttribute('href'))")
    assert links
    for link in links:
        if link.startswith("#"):
            assert page.evaluate("id => document.getElementById(id) !== null", link[1:]), link
        else:
            assert not re.match(r"\w+:", link), f"{link}: the page works without a network"
            path, _, anchor = link.partition("#")
            assert (folder / path).exists(), link
            assert not anchor, link


def test_every_claim_is_shown_with_its_word(open_page, folder, claims):
    page = open_page((folder / "index.html").as_uri())
    for claim in claims:
        text = page.evaluate("id => document.getElementById(id)?.textContent ?? null", f"claim-{claim['id']}")
        assert text is not None, f"no element #claim-{claim['id']}"
        assert word(claim) in text, claim["id"]


def test_the_counts_are_those_of_the_claims(open_page, folder, claims):
    page = open_page((folder / "index.html").as_uri())
    counted = Counter(word(c) for c in claims if not c["question"])
    shown = [re.sub(r"\s+", " ", t).strip() for t in page.evaluate("[...document.querySelectorAll('.tally li')]"
                                                                  ".map(e => e.innerText)")]
    told = {match[2]: int(match[1]) for t in shown if (match := re.fullmatch(r"(\d+) (.+)", t))}
    assert {w: told.get(w) for w in counted} == counted
    assert all(told[w] == 0 for w in set(map(word, claims)) - set(counted) if w in told)


@WIDTHS
@SCHEMES
def test_text_can_be_read_in_light_and_dark(open_page, folder, width, scheme):
    page = open_page((folder / "index.html").as_uri(), width, scheme=scheme)
    ink, paper = colours(page)
    assert (luminance(paper) < 0.2) == (scheme == "dark"), "the page follows the reader's scheme"
    assert contrast(ink, paper) > 7


@SCHEMES
def test_it_prints_in_sensible_pages(open_page, folder, scheme):
    page = open_page((folder / "index.html").as_uri(), scheme=scheme)
    page.emulate_media(media="print")
    ink, _ = colours(page)
    assert contrast(ink, (255, 255, 255)) > 7, "paper is white, whatever the scheme of the screen"
    inside = page.evaluate("[...new Set([...document.querySelectorAll('figure, tbody tr')].map("
                           "e => getComputedStyle(e).breakInside))]")
    assert inside == ["avoid"], "no picture and no row is cut by the end of a page"
    printed = page.pdf(format="A4")
    pages = len(re.findall(rb"/Type\s*/Page\b", printed))
    assert 4 <= pages <= 60
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@WIDTHS
@SCHEMES
def test_axe_finds_nothing_serious(open_page, folder, axe, width, scheme):
    page = open_page((folder / "index.html").as_uri(), width, scheme=scheme)
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    page.evaluate(axe)
    found = page.evaluate("axe.run()")
    assert len(found["passes"]) > 10, "it looked"
    assert [(v["id"], v["impact"], v["nodes"][0]["target"], v["nodes"][0]["failureSummary"])
            for v in found["violations"] if v["impact"] in ("serious", "critical")] == []


def test_headings_are_in_order(open_page, folder):
    page = open_page((folder / "index.html").as_uri())
    levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3, h4, h5, h6')].map(h => +h.tagName[1])")
    assert levels.count(1) == 1
    assert levels[0] == 1
    assert all(b <= a + 1 for a, b in itertools.pairwise(levels)), "no level is left out"


# ---- Colours ---------------------------------------------------------------------------------------------------------

def colours(page):
    """Ink and paper of the page's text: three numbers each."""
    found = page.evaluate("[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]")
    return [tuple(float(x) for x in re.findall(r"[\d.]+", colour)[:3]) for colour in found]


def luminance(rgb):
    parts = [c / 255 for c in rgb]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a, b):
    """WCAG's contrast ratio."""
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_wcags():
    assert contrast((0, 0, 0), (255, 255, 255)) == pytest.approx(21)
    assert contrast((119, 119, 119), (255, 255, 255)) == pytest.approx(4.48, abs=0.01)
