"""Sentences made from claims: they follow from the numbers, and say so where numbers are missing."""

import re

import pytest

from dpngd.suite import claims, pages, stats, story
from dpngd.suite.params import published
from dpngd.suite.runs import Runs
from dpngd.training.config import RunConfig


def row(word="reproduced", parts=(), **more):
    """A row of claims.json."""
    base = claims.decide(next(c for c in claims.all_claims() if c.id == "best-everywhere"), {})
    filled = [{"name": n, "word": w, "estimate": e, "low": None, "high": None, "n": 8, "images": 0, "note": "",
               "power": None} for n, w, e in parts]
    return base | {"word": word, "parts": filled, "unit": " points", "runs": 600, "planned": 600, "held": None,
                   "cells": None, "brief": "+1.00 points", "said": f"{word.capitalize()}: +1.00 points.", **more}


THREE = [("cifar10 ε=1 over dp-sgd", "reproduced", 2.0), ("cifar10 ε=1 over gep", "reproduced", 1.5),
         ("svhn ε=2 over dp-sgd-pt", "inconclusive", -0.25)]


def test_what_one_sees_is_counted_from_the_parts():
    assert story.seen(row(parts=THREE)) == (
        "Of 3 comparisons, each by itself, 2 show it and 1 leaves it open; estimates over the best baseline run from "
        "-0.25 points (SVHN ε=2 over DP-SGD-PT) to +1.50 points (CIFAR-10 ε=1 over GEP).")
    assert "; estimates run from -0.25" in story.seen(row(parts=THREE, cells=3)), "each baseline for itself"
    arms = [("svhn ε=2 dp-sgd-pt over dp-ngd-private-20", "reproduced", 2.0),
            ("svhn ε=2 dp-sgd-pt over dp-ngd-private-50", "reproduced", 3.0)]
    assert "; estimates run from +2.00" in story.seen(row(parts=arms)), "arms are no baselines: each counts"
    other = [*THREE[:2], ("svhn ε=2 over dp-sgd-pt", "refuted", -3.0)]
    assert "2 show it and 1 shows the opposite" in story.seen(row(parts=other))
    assert story.seen(row(parts=THREE[:1], brief="cifar10 +2.00 points")) == "CIFAR-10 +2.00 points."


def test_what_is_missing_is_said():
    assert story.seen(row("not run", runs=0, planned=600)) == "Nothing yet: 600 of 600 runs are missing."
    for planned in (0, 12):  # of 12 that exist, none is what the rule needs
        said = story.seen(row("not run", runs=planned, planned=planned))
        assert said == "Nothing yet: it waits for a search, or is not planned."
    assert "12 of 600 runs are missing" in story.seen(row("not run", THREE, runs=588))
    assert "preliminary" in story.seen(row("not run", THREE, runs=588))


def test_a_demonstration_has_numbers_and_no_word():
    said = story.seen(row("demonstration only", THREE))
    assert "-0.25 points" in said
    assert "decides nothing" in said
    assert not re.search("show it|opposite|open", said)
    html = story.claim(row("demonstration only", THREE))
    assert "demonstration only" in html
    assert not any(word in html for word in stats.WORDS)


def test_missing_runs_are_counted():
    configs = [RunConfig.from_dict({"method": "dp-sgd", "data": "digits", "model": "small", "epsilon": 2.0, "B": 64,
                                    "T": 10, "C": 1.0, "eta": 1.0, "seed": s}) for s in range(3)]
    assert story.missing(Runs(configs, {})) == "not run: 3 of 3 runs are missing"
    assert story.missing(Runs(configs, {configs[0].key(): {}})) == "preliminary: 2 of 3 runs are missing"
    assert story.missing(Runs(configs, {c.key(): {} for c in configs})) == ""
    assert story.missing(Runs([], {})) == "it waits for a search, or is not planned"


def test_names_are_those_of_figures():
    assert story.labelled("cifar10 ε=1 dp-ngd over dp-ngd-one-sided") == "CIFAR-10 ε=1 DP-NGD over one-sided"
    assert story.labelled("dp-sgdx, my-gep") == "dp-sgdx, my-gep", "whole names only"


def test_a_claim_has_one_word_and_its_verdict_once():
    html = story.claim(row(parts=THREE))
    assert html.count("✓ reproduced") == 1
    assert "What one sees: Of 3 comparisons" in html
    assert "Reproduced:" not in html, "the badge has the word"
    alone = row(parts=THREE[:1], brief="cifar10 ε=1 over dp-sgd +2.00 points",
                said="Reproduced: cifar10 ε=1 over dp-sgd +2.00 points (n = 8 seeds).")
    assert "<p>What one sees: CIFAR-10 ε=1 over DP-SGD +2.00 points.</p>" in story.claim(alone)
    assert "</b> n = 8 seeds." in story.claim(alone), "and not the same again"
    undecided = story.claim(row("not run", runs=0))
    assert undecided.count("600 of 600 runs are missing") == 1
    assert "What one sees" not in undecided


def test_tables_are_left_aligned_and_escaped():
    html = story.html_table(["a"], [["<i>**1**</i>"], ["<u>raw</u>"]])
    assert "&lt;i&gt;<b>1</b>&lt;/i&gt;" in html
    assert html.count("text-align: left") == 3
    assert "<u>raw</u>" in story.html_table(["a"], [["<u>raw</u>"]], raw=(0,))


def test_what_was_learned():
    rows = [row(), row("not run", runs=0), row("refuted", question="Why?", brief="-1.00 points")]
    said = story.learned(rows)
    assert said[:2] == ["The paper's 2 claims: 1 reproduced, 1 not run.", "Our own 1 question: 1 refuted."]
    assert said[2].endswith("It holds: +1.00 points.")
    assert said[3].endswith("It does not hold: -1.00 points.")
    assert story.learned([row(brief="all 4 hold; +1.00 to +2.00 points")])[1].endswith("It holds: +1.00 to +2.00 "
                                                                                        "points.")
    assert "nothing is learned yet" in story.learned([row("not run", runs=0)])[-1]
    assert "decides no claim" in story.learned([row("demonstration only")])[-1]


def test_the_best_rival_counts_in_the_range():
    said = story.brief(row(parts=THREE, held=1, cells=2))
    assert said == "shown in 1 of 2; -0.25 to +1.50 points over the best baseline"
    assert story.brief(row(parts=THREE[:1], held=1, cells=1)) == "+2.00 points"
    assert story.brief(row("demonstration only", THREE, held=None, cells=2)).startswith("-0.25 to +1.50 points")


def test_costs_are_multiples():
    parts = [("resnet-20", "reproduced", 1.25), ("wrn-16-4", "reproduced", 2.0)]
    costs = row(parts=parts, unit=" times a DP-SGD step")
    assert story.seen(costs).endswith("from 1.25 times a DP-SGD step (resnet-20) to 2.00 times a DP-SGD step "
                                      "(wrn-16-4).")
    said = story.brief(costs)
    steps = {r[2]: r[3] for r in published()["overhead"]["rows"] if r[0] == "cifar10"}
    assert said.startswith("1.25 to 2.00 times a DP-SGD step; the paper: ")
    assert f"{steps['dp-ngd'] / steps['dp-sgd-pt']:.1f}" in said


def test_the_readme_has_three_sentences_whatever_is_known():
    rows = [claims.decide(c, {}) for c in claims.all_claims()]
    said = story.found(rows)
    assert len(said) == 3
    assert all(s.count("not run yet") == 2 and s.endswith(".") for s in said)
    by = {r["id"]: i for i, r in enumerate(rows)}
    rows[by["best-everywhere"]] = row("inconclusive", THREE, fragile=True, held=1, cells=2)
    first = story.found(rows)[0]
    assert first.startswith("DP-NGD leads the best baseline in 1 of 2 cells (-0.25 to +1.50 points); in 1 the lead is "
                            "significant after correction. That it is more accurate than every baseline in every cell "
                            "is **inconclusive (fragile)**. Its lead falls from ε = 1 to 8: not run yet")


@pytest.mark.parametrize("word", ["not run", "reproduced"])
def test_the_readmes_picture_comes_with_its_word(word, monkeypatch, tmp_path):
    rows = [claims.decide(c, {}) | {"word": word} for c in claims.all_claims()]
    if word == "reproduced":  # a data set of Table 2 is complete
        next(r for r in rows if r["id"] == "best-everywhere")["parts"] = [
            {"name": "svhn ε=1 over gep", "n": 8, "estimate": 1.0},
            {"name": "cifar10 ε=1 over gep", "n": 7, "estimate": 2.0}]
    data = {"claims": rows, "compute": {"tests": {"planned": 2000, "there": 7}}}
    monkeypatch.setattr(pages.report, "current", lambda profile: data)
    monkeypatch.setattr(pages.Store, "shipped", {"key": {"evaluated_on": "test"}})
    monkeypatch.setattr(pages.paths, "ROOT", tmp_path, raising=False)
    monkeypatch.setattr(pages.paths, "FIGURES", tmp_path / "figures", raising=False)
    (tmp_path / "figures" / "cpu").mkdir(parents=True)
    for name in ("lead", "theorem"):
        (tmp_path / "figures" / "cpu" / f"{name}.png").write_bytes(b"")
    part = pages.found_part()
    assert ("](figures/cpu/lead.png)" in part) == (word == "reproduced")
    assert ("](figures/cpu/theorem.png)" in part) == (word == "not run")
    assert ("Open 01 first" in pages.notebooks_part()) == (word == "reproduced")
    assert ("7 of 2,000 planned runs on test sets are there" in part) == (word == "not run")


def test_a_readme_without_its_markers_is_an_error():
    with pytest.raises(ValueError, match=r"README\.md needs one line '<!-- found: written by make docs -->'"):
        pages.with_parts("README.md", "# x\n")
