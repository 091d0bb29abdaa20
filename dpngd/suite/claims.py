"""The paper's claims as data: sentence, place, published numbers, the runs that decide it, and the rule.

`published()` numbers are computed from params/published.yaml, ours from stored runs; nothing is typed here but the
words. A claim with a `question` is ours: the paper does not answer it, and its paper column is empty.

`decide` makes a row of claims.json: the word of `stats`, its estimate with interval, n and power, whether the word is
fragile (leaving out one seed changes it), and the sentences that a report needs. While planned runs are missing
the word is "not run". Profiles of DEMONSTRATIONS get no word at all: their rows say "demonstration only".
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dpngd.files import finite_or_none
from dpngd.methods import arms, baselines
from dpngd.suite import rules, stats
from dpngd.suite.params import published
from dpngd.suite.rules import Decision, Theory
from dpngd.suite.runs import Runs

MEASURED = ("theory", "bench")  # notebook 00's Theory, and the report of `dpngd bench`
EDITION = 2  # of words, rules and rows: a claims.json of another edition is not read as one of this
DEMONSTRATIONS = ("quick",)  # profiles that show the suite at work and decide nothing


@dataclass(frozen=True)
class Claim:
    """One sentence that can turn out wrong."""

    id: str
    notebook: str
    sentence: str
    place: str
    paper: str  # the published numbers, in words
    source: str  # the artifact whose runs decide it (or several, a+b), or what was measured: one of MEASURED
    rule: Callable[..., Decision]
    question: str = ""  # asked by us, not by the paper
    methods: tuple[str, ...] = ()  # the methods that it needs of the artifact; all where empty
    timed: bool = False  # rests on a clock: its word may differ from one run to the next
    steady: bool = False  # holds on every machine, under `quick` too: what the notebooks check
    gated: bool = False  # about epsilon: its rule also takes what the gate found
    further: tuple[str, ...] = ()  # claims that look into the reason where it is refuted or stays open


def _text(section: str, name: str, **where: Any) -> Any:
    """The value of a `text` row of published.yaml."""
    rows = [row for row in published()[section]["text"]
            if row["name"] == name and all(row.get(k) == v for k, v in where.items())]
    if len(rows) != 1:
        raise KeyError(f"published.yaml: {len(rows)} rows {name!r} in {section}")
    return rows[0]["value"]


def paper_leads() -> dict[tuple[str, float], float]:
    """The paper's own lead over the best baseline, cell by cell of Table 2."""
    table = published()["utility_table"]
    return {(data, epsilon): rows["dp-ngd"][i] - max(rows[m][i] for m in baselines())
            for data, rows in table["mean"].items() for i, epsilon in enumerate(table["epsilons"])}


def _leads() -> str:
    leads = list(paper_leads().values())
    return f"all {len(leads)} cells, by {min(leads):.2f} to {max(leads):.2f} points"


def _small_epsilon() -> str:
    leads, epsilons = paper_leads(), published()["utility_table"]["epsilons"]
    return "; ".join(f"{d} {leads[d, epsilons[0]]:.2f} at ε={epsilons[0]:g}, {leads[d, epsilons[-1]]:.2f} at "
                     f"{epsilons[-1]:g}" for d in published()["utility_table"]["mean"])


def _leads_of(section: str, *pairs: tuple[str, str]) -> str:
    """Differences of the paper's means: as ours are shown, and on no scale of accuracies that are not comparable."""
    t = published()[section]
    leads = {pair: [x - y for x, y in zip(*(t["mean"][m] for m in pair), strict=True)] for pair in pairs}
    said = "; ".join(f"{a} over {b} " + ", ".join(f"{x:+.2f}" for x in found) for (a, b), found in leads.items())
    return f"{said} points at ε=" + ", ".join(f"{e:g}" for e in t["epsilons"])


def _axis(name: str) -> str:
    axis = published()["robustness"]["axes"][name]
    return f"within {max(axis['mean']) - min(axis['mean']):.2f} points over {name} {axis['values'][0]:g} to " \
           f"{axis['values'][-1]:g}"


def overhead_rows() -> dict[str, dict[str, list]]:
    """Table 5 by data set and method: [seconds per step, steps, hours]."""
    found: dict[str, dict[str, list]] = {}
    for data, _, method, *numbers in published()["overhead"]["rows"]:
        found.setdefault(data, {})[method] = numbers
    return found


def paper_step_cost() -> dict[str, float]:
    """Table 5 by data set: seconds of a DP-NGD step over those of a DP-SGD-PT step."""
    return {data: rows["dp-ngd"][0] / rows["dp-sgd-pt"][0] for data, rows in overhead_rows().items()}


def _speed(ratio: float) -> str:
    return f"{ratio:.2f}{rules.AS_FAST}" if ratio >= 1 else f"takes {1 / ratio:.2f} times as long"


def _any_two(what: str) -> str:
    return f"The rule compares each {what} with the default one: what if any two are compared?"


def _floor(method: str) -> float:
    return _text("ablation_floor", "accuracy", method=method)


@functools.cache
def all_claims() -> tuple[Claim, ...]:
    """Every claim, in the order of the notebooks. Built when first asked for: it reads params/published.yaml."""
    paper = published()
    fewer = {row["data"]: row["value"] for row in paper["convergence"]["text"] if row["name"] == "fewer steps"}
    step_cost = paper_step_cost()
    total = {d: r["dp-sgd-pt"][2] / r["dp-ngd"][2] for d, r in overhead_rows().items()}
    fluctuation = _text("sample_efficiency", "change over all sizes below")
    images = next(row["value"] for row in paper["setup"]["values"] if row["name"] == "public_size")
    t_cur = paper["robustness"]["axes"]["T_cur"]
    eight = t_cur["mean"][t_cur["values"].index(8)]
    drop = _text("robustness", "drop from T_cur 1 to 16 below")
    against = (*baselines(), "dp-ngd")
    drawn = ("dp-sgd-pt", "adadps", "dp-ngd")  # in the paper's Figure 2; our own questions ask for all baselines
    floors = ("dp-ngd", "dp-ngd-fixed-floor")
    open_choices = tuple(arms("clamping", "labels"))
    below = ("dp-sgd-pt", "dp-ngd-private-20"), ("dp-sgd-pt", "dp-ngd-private-50")
    paid = ("dp-ngd", "dp-ngd-private-20"), ("dp-ngd", "dp-ngd-private-50")
    spaces = ("dp-ngd", "dp-ngd-post"), ("dp-ngd-post", "dp-ngd-pre")
    return (
        # ---- Notebook 00: what the paper proves (sections 3.2 and 3.3)
        Claim("theorem-mean", "00_geometry",
              "The update is the clipped natural gradient in expectation.",
              "Theorem 1, section 3.2", "−(η/B) Σ c F⁻¹g, proved", "theory", Theory.mean, steady=True),
        Claim("theorem-covariance", "00_geometry",
              "Its noise has the covariance η²σ²C²/B² F⁻¹.",
              "Theorem 1, section 3.2", "η²σ²C²/B² F⁻¹, proved", "theory", Theory.covariance, steady=True),
        Claim("kl-dp-duality", "00_geometry",
              "The clipping bound C is also the radius of a KL trust region.",
              "section 3.2", "½ Δθᵀ F Δθ ≤ η²C²/2 for one sample, proved", "theory", Theory.duality, steady=True),
        Claim("safety-bound", "00_geometry",
              "With the floor at λ_safe the expected step is no longer than DP-SGD's bound.",
              "section 3.3", "E‖Δθ‖² ≤ η_sgd² C_sgd² (1 + dσ²/B²), proved", "theory", Theory.safety, steady=True),
        # ---- Notebook 01: Table 2, accuracy at every budget
        Claim("best-everywhere", "01_utility_table",
              "DP-NGD is more accurate than every baseline in every cell.",
              paper["utility_table"]["place"], _leads(), "utility_table", rules.best_in_every_cell,
              methods=against,
              further=("tuned-between", "mean-choice", "untuned-ahead")),
        Claim("stricter-larger", "01_utility_table",
              "The advantage is larger under stricter privacy.",
              paper["utility_table"]["place"], _small_epsilon(), "utility_table",
              rules.larger_when_stricter, methods=against, gated=True,
              further=("tuned-between", "mean-choice")),
        Claim("same-privacy", "01_utility_table",
              "DP-NGD costs exactly the privacy of DP-SGD.",
              paper["privacy_table"]["place"], "same σ and q, same (ε, δ)", "utility_table", rules.same_privacy,
              steady=True),
        Claim("untuned-ahead", "01_utility_table",
              "DP-NGD free (nothing to tune, no public data) is more accurate than every tuned baseline.",
              "our question", "", "utility_table", rules.untuned_ahead("dp-ngd-free"),
              question="What is left of the gain when nothing is tuned and the public images are noise of our own?",
              methods=(*baselines(), "dp-ngd-free")),
        Claim("untuned-level", "01_utility_table",
              "DP-NGD free loses less than 1 point to tuned DP-NGD.",
              "our question", "", "utility_table", rules.untuned_level("dp-ngd-free"),
              question="What does DP-NGD free lose to tuned DP-NGD with real public images?",
              methods=("dp-ngd", "dp-ngd-free")),
        Claim("kl-step-level", "01_utility_table",
              "DP-NGD, KL step (nothing to tune, real public images) loses less than 1 point to tuned DP-NGD.",
              "our question", "", "utility_table", rules.untuned_level("dp-ngd-kl"),
              question="Can a KL budget take the place of the tuned rate and floor?",
              methods=("dp-ngd", "dp-ngd-kl")),
        Claim("tuned-between", "01_utility_table",
              "With a search at that ε itself, DP-NGD is more accurate there than every baseline.",
              "our question", "", "between", rules.best_in_every_cell,
              question="An ε between two of the search takes the settings of the nearer one: what does that change?",
              methods=against),
        Claim("untuned-between", "01_utility_table",
              "DP-NGD free is more accurate than baselines that were searched at that ε itself.",
              "our question", "", "between", rules.untuned_ahead("dp-ngd-free"),
              question="Does DP-NGD free also lead baselines that were searched at that ε?",
              methods=(*baselines(), "dp-ngd-free")),
        Claim("mean-choice", "01_utility_table",
              "With its best finalist by mean, DP-NGD is more accurate than every baseline in every cell.",
              "our question", "", "mean_choice", rules.best_in_every_cell,
              question="The search takes the smallest rate near the best, which for DP-NGD is its lowest floor: what "
                       "does that cost it?", methods=against),
        Claim("whole-set", "01_utility_table",
              "On the whole private set DP-NGD is ahead of DP-SGD too.",
              "our question", "", "whole", rules.chain(("dp-ngd", "dp-sgd")),
              question="Does the picture hold on the whole of CIFAR-10, at a sampling rate below the paper's?",
              methods=("dp-sgd", "dp-ngd")),
        Claim("subset", "01_utility_table",
              "The subset changes DP-NGD's lead over DP-SGD by less than 1 point.",
              "our question", "", "whole+utility_table", rules.subset_matters("dp-sgd"),
              question="How much does it matter that the runs are on a subset?", methods=("dp-sgd", "dp-ngd")),
        Claim("other-networks", "01_utility_table",
              "DP-NGD gains over DP-SGD on another network.",
              "our question", "", "networks", rules.over_each(("model", "K"), "dp-sgd"),
              question="Does the gain depend on the network?", methods=("dp-sgd", "dp-ngd")),
        Claim("views", "01_utility_table",
              "DP-NGD gains over DP-SGD with one view of an image and with several.",
              "our question", "", "views", rules.over_each(("model", "K"), "dp-sgd"),
              question="Does the gain depend on training without augmentation?", methods=("dp-sgd", "dp-ngd")),
        # ---- Notebook 02: Figure 2, accuracy against steps
        Claim("every-budget", "02_convergence_curves",
              "DP-NGD is more accurate than DP-SGD-PT and AdaDPS at every step budget.",
              paper["convergence"]["place"], "every point of the figure", "convergence", rules.higher_at_every_budget,
              methods=drawn,
              further=("own-budget",)),
        Claim("fewer-steps", "02_convergence_curves",
              "DP-NGD reaches the peak of DP-SGD-PT and AdaDPS in a fraction of the steps.",
              paper["convergence"]["place"], "; ".join(f"{d} {v:g} times fewer" for d, v in fewer.items()),
              "convergence", rules.fewer_steps(fewer), methods=drawn,
              further=("faster", "own-budget")),
        Claim("faster", "02_convergence_curves",
              "DP-NGD reaches the peak of all four baselines in fewer steps than they do.",
              "our question", "", "convergence", rules.fewer_steps({"any": 1.0}), methods=against,
              question="Whatever the factor: is DP-NGD faster at all?"),
        Claim("own-budget", "02_convergence_curves",
              "With every method at its own best step budget DP-NGD is ahead.",
              "our question", "", "convergence", rules.ahead_at_own_budget, methods=against,
              question="Is DP-NGD only faster, or also better when every method may take the steps it needs?"),
        Claim("lead-fades", "02_convergence_curves",
              "The lead shrinks as the step budget grows.",
              "our question", "", "convergence", rules.lead_fades, methods=against,
              question="Is the lead a matter of speed: is it larger the fewer steps there are?"),
        # ---- Notebook 03: Figure 3, public images
        Claim("few-images", "03_public_sample_efficiency",
              "DP-NGD hardly depends on how many public images there are.",
              paper["sample_efficiency"]["place"], f"less than {fluctuation} point from 50 to 5,000 images",
              "sample_efficiency", rules.hardly_depends("public_size", images), methods=("dp-ngd",)),
        Claim("few-images-range", "03_public_sample_efficiency",
              "Any two numbers of public images are within 1 point of each other.",
              "our question", "", "sample_efficiency", rules.hardly_depends("public_size", pairs=True),
              methods=("dp-ngd",), question=_any_two("number of public images")),
        Claim("baselines-need-images", "03_public_sample_efficiency",
              "The baselines get better with more public images.",
              paper["sample_efficiency"]["place"], "all three improve steadily", "sample_efficiency",
              rules.baselines_need_images, methods=tuple(baselines()),
              further=("longer-pretraining",)),
        Claim("ahead-with-images", "03_public_sample_efficiency",
              "Even with the most public images the baselines stay behind.",
              paper["sample_efficiency"]["place"], "all three below DP-NGD at 5,000 images", "sample_efficiency",
              rules.ahead_with_most_images, methods=against),
        Claim("longer-pretraining", "03_public_sample_efficiency",
              "Pre-trained as long as suits it, DP-SGD-PT gains from more public images.",
              "our question", "", "pretraining", rules.more_images_pay,
              question="Does DP-SGD-PT gain little from more images only because its pre-training was tuned on few?"),
        Claim("any-source", "03_public_sample_efficiency",
              "DP-NGD gains over DP-SGD whatever the public images are.",
              "our question", "", "sources", rules.over("public", "dp-sgd"),
              question="Does the gain over DP-SGD survive when the public images are of another kind, "
                       "two photographs, or noise?"),
        # ---- Notebook 04: Tables 3 and 4, Figure 4, what each part does
        Claim("private-curvature", "04_ablations",
              "With curvature paid from the privacy budget, DP-NGD is less accurate than DP-SGD-PT.",
              paper["ablation_decoupling"]["place"],
              _leads_of("ablation_decoupling", *below), "ablation_decoupling", rules.chain(*below),
              further=("often-released", "private-curvature-equal")),
        Claim("private-drop", "04_ablations",
              "Curvature paid from the privacy budget costs DP-NGD accuracy against curvature from public images.",
              paper["ablation_decoupling"]["place"], _leads_of("ablation_decoupling", *paid), "ablation_decoupling",
              rules.chain(*paid), further=("often-released", "private-curvature-equal")),
        Claim("private-curvature-equal", "04_ablations",
              "At the rate of the equation, curvature from public images is ahead of curvature from the budget.",
              "our question", "", "ablation_decoupling_equal", rules.chain(*paid),
              question="Table 3 has every arm at its own best rate: and at the rate that the equation gives?"),
        Claim("often-released", "04_ablations",
              "With private curvature released at every step, DP-NGD is less accurate than DP-SGD-PT.",
              "our question", "", "releases", rules.below_when_released("dp-sgd-pt"),
              question="Does curvature paid from the budget do well only because it is released a few times?"),
        Claim("public-curvature", "04_ablations",
              "With curvature from public images, DP-NGD is more accurate than DP-SGD-PT.",
              paper["ablation_decoupling"]["place"], _leads_of("ablation_decoupling", ("dp-ngd", "dp-sgd-pt")),
              "ablation_decoupling", rules.chain(("dp-ngd", "dp-sgd-pt")), methods=("dp-ngd", "dp-sgd-pt"),
              further=("tuned-between", "mean-choice")),
        Claim("clipping-space", "04_ablations",
              "Clipping whitened gradients is more accurate than post-conditioning, and that than pre-conditioning.",
              paper["ablation_clipping"]["place"], _leads_of("ablation_clipping", *spaces), "ablation_clipping",
              rules.chain(*spaces),
              further=("clipping-space-equal", "mapping-back")),
        Claim("clipping-space-equal", "04_ablations",
              "The order of the clipping spaces is the same at the rate of the equation.",
              "our question", "", "ablation_clipping_equal", rules.chain(*spaces),
              question="Table 4 has every arm at its own best rate: and at the rate that the equation gives?"),
        Claim("no-floor", "04_ablations",
              "Without a floor training diverges.",
              paper["ablation_floor"]["place"], "NaN within the first few steps", "ablation_floor",
              rules.diverges("dp-ngd-no-floor"), methods=("dp-ngd-no-floor",), steady=True),
        Claim("dynamic-floor", "04_ablations",
              "The dynamic floor beats the fixed one.",
              paper["ablation_floor"]["place"], f"{_floor('dp-ngd') - _floor('dp-ngd-fixed-floor'):+.2f} points",
              "ablation_floor", rules.chain(floors), methods=floors,
              further=("dynamic-floor-equal",)),
        Claim("dynamic-loss", "04_ablations",
              "After the first quarter of the steps the dynamic floor has the lower training loss.",
              paper["ablation_floor"]["place"], "the whole curve", "ablation_floor", rules.lower_loss(*floors),
              methods=floors,
              further=("dynamic-loss-equal",)),
        Claim("dynamic-floor-equal", "04_ablations",
              "The dynamic floor beats the fixed one at the rate of the equation.",
              "our question", "", "ablation_floor_equal", rules.chain(floors), methods=floors,
              question="Figure 4 has each floor at its own best rate: and at the rate that the equation gives?"),
        Claim("dynamic-loss-equal", "04_ablations",
              "At the rate of the equation, too, the dynamic floor has the lower loss after the first quarter.",
              "our question", "", "ablation_floor_equal", rules.lower_loss(*floors), methods=floors,
              question="Is a lower loss the floor's doing, or that of another rate?"),
        Claim("bound-cost", "04_ablations",
              "The further the safety equation is broken, the more accuracy it costs.",
              "our question", "", "bound", rules.breaking_costs, methods=("dp-ngd",),
              question="What does breaking the bound do: a larger rate with the floor left alone?"),
        Claim("bound-unstable", "04_ablations",
              "Where the safety equation is broken most, training is unstable.",
              "our question", "", "bound", rules.breaking_destabilises, methods=("dp-ngd",),
              question="Does breaking the equation make training unstable?"),
        Claim("kl-needs-curvature", "04_ablations",
              "With a KL step, DP-NGD is ahead of DP-SGD with one.",
              "our question", "", "kl_maps", rules.chain(("dp-ngd-kl", "dp-sgd-kl")),
              question="Is it the KL step alone that helps, or the curvature with it?",
              methods=("dp-ngd-kl", "dp-sgd-kl")),
        Claim("kl-step-alone", "04_ablations",
              "Without curvature a KL step costs accuracy: DP-SGD with one is below tuned DP-SGD.",
              "our question", "", "kl_maps", rules.chain(("dp-sgd", "dp-sgd-kl")), methods=("dp-sgd", "dp-sgd-kl"),
              question="Does the KL step serve DP-SGD too?"),
        Claim("floor-by-rank", "04_ablations",
              "With its floor by rank and no search of its own, DP-NGD loses less than 1 point to tuned DP-NGD.",
              "our question", "", "ablation_ours", rules.untuned_level("dp-ngd-auto"),
              methods=("dp-ngd", "dp-ngd-auto"),
              question="Does a user of DP-SGD have to tune anything new?"),
        Claim("mapping-back", "04_ablations",
              "Mapping back with F^-1/2 helps: one-sided whitening is worse.",
              "our question", "", "ablation_ours", rules.chain(("dp-ngd", "dp-ngd-one-sided")),
              methods=("dp-ngd", "dp-ngd-one-sided"),
              question="Is the second F^-1/2, which maps the noisy sum back, worth its noise?"),
        Claim("clamped-share", "04_ablations",
              "Most eigenvalues lie on the floor all through a run.",
              "our question", "", "ablation_floor", rules.mostly_clamped, methods=("dp-ngd",), steady=True,
              question="What does the share of clamped eigenvalues do over a run?"),
        Claim("clamp-and-labels", "04_ablations",
              "Clamping factors or product, and the Fisher's labels, change under 1 point.",
              "our question", "", "ablation_ours", rules.alike(open_choices), methods=("dp-ngd", *open_choices),
              question="Does it matter whether factors or their product are clamped, and which labels "
                       "the Fisher takes?"),
        # ---- Notebook 05: Table 5, time
        Claim("step-cost", "05_wallclock_overhead",
              "A DP-NGD step costs no more than the paper's multiple of a DP-SGD-PT step.",
              paper["overhead"]["place"], "; ".join(f"{d} {v:.1f} times" for d, v in step_cost.items()), "overhead",
              rules.step_cost(step_cost), methods=("dp-sgd-pt", "dp-ngd"), timed=True,
              further=("step-cost-bench",)),
        Claim("step-cost-bench", "05_wallclock_overhead",
              f"On a CPU and four networks (two of them the paper's), a DP-NGD step costs at most "
              f"{min(step_cost.values()):.1f} times a DP-SGD step.",
              paper["overhead"]["place"], "; ".join(f"{d} {v:.1f} times" for d, v in step_cost.items()), "bench",
              rules.benched(min(step_cost.values())), timed=True),
        Claim("total-time", "05_wallclock_overhead",
              f"Time to DP-SGD-PT's peak is comparable or lower: at most {1 / min(total.values()):.2f} times as long.",
              paper["overhead"]["place"], "; ".join(f"{d} {_speed(v)}" for d, v in total.items()),
              "overhead", rules.total_time(min(total.values())), methods=("dp-sgd-pt", "dp-ngd"), timed=True),
        # ---- Notebook 06: Table 6, what has to be tuned
        Claim("rare-updates", "06_hyperparameter_robustness",
              "Up to 16 steps between two refreshes of the curvature hardly matter.",
              paper["robustness"]["place"], f"less than {drop} points from T_cur 1 to 16", "robustness",
              rules.hardly_depends("T_cur", upto=16),
              further=("once-only",)),
        Claim("too-rare", "06_hyperparameter_robustness",
              "With 32 steps between two refreshes accuracy declines.",
              paper["robustness"]["place"],
              f"{eight - _text('robustness', 'accuracy at T_cur 32'):+.2f} points at 8",
              "robustness", rules.drop("T_cur", 8, 32),
              further=("once-only",)),
        Claim("once-only", "06_hyperparameter_robustness",
              "Curvature that is hardly ever refreshed costs accuracy.",
              "our question", "", "robustness", rules.rarest_curvature_costs,
              question="Must the curvature follow the weights, or would one that is hardly ever refreshed do?"),
        Claim("exponent", "06_hyperparameter_robustness",
              "The exponent p hardly matters.",
              paper["robustness"]["place"], _axis("p"), "robustness", rules.hardly_depends("p")),
        Claim("warm-up", "06_hyperparameter_robustness",
              "The warm-up T1 hardly matters.",
              paper["robustness"]["place"], _axis("T1"), "robustness", rules.hardly_depends("T1")),
        Claim("rare-updates-range", "06_hyperparameter_robustness",
              "Any two T_cur from 1 to 16 are within 1 point of each other.",
              "our question", "", "robustness", rules.hardly_depends("T_cur", upto=16, pairs=True),
              question=_any_two("T_cur")),
        Claim("exponent-range", "06_hyperparameter_robustness",
              "Any two exponents p are within 1 point of each other.",
              "our question", "", "robustness", rules.hardly_depends("p", pairs=True), question=_any_two("p")),
        Claim("warm-up-range", "06_hyperparameter_robustness",
              "Any two warm-ups T1 are within 1 point of each other.",
              "our question", "", "robustness", rules.hardly_depends("T1", pairs=True), question=_any_two("T1")),
    )


ROW = ("id", "notebook", "sentence", "question", "place", "paper", "ours", "brief", "timed", "word", "estimate", "low",
       "high", "unit", "n", "images", "power", "fragile", "held", "cells", "parts", "runs", "planned", "rule", "holds",
       "said", "power_said", "would_decide", "further")


def of_notebook(notebook: str) -> list[Claim]:
    return [c for c in all_claims() if c.notebook == notebook]


def decide(claim: Claim, sources: Mapping[str, Any], *, demonstration: bool = False,
           gated: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A claim's row in claims.json, from the runs by artifact, what was measured, and what the profile's gate found."""
    rule = functools.partial(claim.rule, gated=gated or {}) if claim.gated else claim.rule
    parts = [sources.get(name) for name in claim.source.split("+")]
    source = None if None in parts else functools.reduce(operator.add, parts)  # of several, none may be missing
    runs = planned = 0
    if isinstance(source, Runs):
        source = source.where(method=list(claim.methods)) if claim.methods else source
        runs, planned = len(source), len(source.configs)
    decision = rule(source) if source is not None and (runs or not isinstance(source, Runs)) else None
    word = decision.word if decision is not None and runs == planned else stats.NOT_RUN
    fragile = word != stats.NOT_RUN and isinstance(source, Runs) and any(
        rule(source.without(seed)).word != word for seed in source.values("seed"))
    row = {"id": claim.id, "notebook": claim.notebook, "sentence": claim.sentence, "question": claim.question,
           "place": claim.place, "paper": claim.paper, "timed": claim.timed, "word": word, "runs": runs,
           "planned": planned, "fragile": fragile, **_numbers(decision, word)}
    if demonstration or word == stats.NOT_RUN:  # numbers may be looked at, words may not
        row["word"] = word = word if word == stats.NOT_RUN else stats.DEMONSTRATION
        row |= {"fragile": False, "held": None, "parts": [{**p, "word": word} for p in row["parts"]]}
    elif decision is not None and decision.tally:
        row["ours"] = f"{decision.tally}: {row['ours']}"  # `without_tally` cuts it off again
        row["brief"] = f"{decision.tally}; {row['brief']}" if decision.brief else row["ours"]
    row |= texts(row, decision)
    row["further"] = looked_into(claim) if word in (stats.REFUTED, stats.INCONCLUSIVE) else ""
    return {name: row[name] for name in ROW}


def _numbers(decision: Decision | None, word: str) -> dict[str, Any]:
    """What a row has of its decision; all of it stays empty without one."""
    if decision is None:
        return {"ours": stats.NOT_RUN, "brief": stats.NOT_RUN, "estimate": None, "low": None, "high": None, "unit": "",
                "n": 0, "images": 0, "power": None, "held": None, "cells": None, "parts": [], "rule": "", "holds": None}
    verdict = decision.verdict
    e = verdict.weakest.estimate if verdict and verdict.weakest and word != stats.NOT_RUN else None
    parts = [{"name": p.name, "word": p.word, "n": p.estimate.n, "images": p.estimate.images, "note": p.note,
              **_interval(p.estimate), "power": finite_or_none(p.power)} for p in decision.parts]
    return {"ours": decision.ours, "brief": decision.brief or decision.ours, **_interval(e or stats.NOTHING),
            "unit": decision.unit if verdict else "", "n": decision.n,
            "images": min((p["images"] for p in parts if p["n"]), default=0), "power": finite_or_none(decision.power),
            "held": verdict.held if verdict else None, "cells": verdict.cells if verdict else None, "parts": parts,
            "rule": decision.rule, "holds": decision.holds}


def _interval(e: stats.Estimate) -> dict[str, float | None]:
    return {"estimate": finite_or_none(e.mean), "low": finite_or_none(e.low), "high": finite_or_none(e.high)}


def texts(row: Mapping[str, Any], decision: Decision | None) -> dict[str, str]:
    """The sentences of a claim for a report: what we found, what this n could see, and what would decide it.

    `said` has the numbers with their interval (of several comparisons, that on which the word rests), `power_said` the
    smallest difference seen with 80 % power, `would_decide` is empty unless the claim is open."""
    word = row["word"]
    if word == stats.NOT_RUN or decision is None:
        there = f": {row['runs']:,} of {row['planned']:,} planned runs are there" if row["runs"] < row["planned"] else \
            ": none of its runs were made on one machine" if row["planned"] and row["timed"] else \
            ": it waits for a search, or is not planned" if row["planned"] else ""
        return {"said": f"Not run{there}.", "power_said": "", "would_decide": ""}
    if word == stats.DEMONSTRATION:
        return {"said": f"Demonstration only: {row['brief']}.", "power_said": "", "would_decide": ""}
    weakest = decision.verdict.weakest if decision.verdict else None
    found = row["ours"]
    if weakest is not None and row["cells"] > 1:
        found = f"{decision.tally}; {'strongest counter-case' if word == stats.REFUTED else 'weakest case'}: " \
                f"{weakest.name} " \
                f"{rules.part_said(weakest, decision.unit, 3 if 'nats' in decision.unit else 2)}"
    behind = ""
    if decision.parts and row["n"]:
        of = " runs" if weakest and weakest.estimate.kind == "share" else "" if row["timed"] else " seeds"
        behind = f" (n = {row['n']}{of}" + (f", {row['images']:,} test images" if row["images"] else
                                           " only" if decision.unit == rules.IN_POINTS else "") + ")"
    fragile = " Fragile: leaving out one seed changes the verdict." if row["fragile"] else ""
    power = decision.power_said
    return {"said": f"{word.capitalize()}: {found}{behind}.{fragile}",
            "power_said": f"{power[0].upper()}{power[1:]}." if power else "",
            "would_decide": f"What would decide it: {decision.would}." if decision.would else ""}


def looked_into(claim: Claim) -> str:
    """The claims that ask for the reason, by their sentences."""
    by_id = {c.id: f"“{c.sentence.rstrip('.')}”" for c in all_claims()}
    return f"See also: {', '.join(by_id[name] for name in claim.further)}." if claim.further else ""


HELD = {stats.REPRODUCED: "It holds", stats.REFUTED: "It does not hold",
        stats.EQUIVALENT: f"There is no difference of {stats.MARGIN:g} point or more",
        stats.INCONCLUSIVE: "These runs do not decide it", stats.NOT_TESTABLE: "It cannot be tested here",
        stats.NOT_RUN: "Not run yet", stats.DEMONSTRATION: "Demonstration only"}


TALLY = re.compile(r"^(both hold|all \d+ hold|\d+ of \d+ hold after Holm)(, \d+ not testable here)?[:;] ")


def without_tally(text: str) -> str:
    return TALLY.sub("", text)


def answer(row: Mapping[str, Any]) -> str:
    """What the runs say to a question of ours."""
    said = "" if row["word"] == stats.NOT_RUN else f": {row['ours']}"
    return f"“{row['sentence']}” {HELD[row['word']]}{said}{'' if said.endswith('.') else '.'}"


def worded(row: Mapping[str, Any]) -> str:
    """The word with its mark."""
    return row["word"] + (" (fragile)" if row["fragile"] else "")


def seeds_text(row: Mapping[str, Any]) -> str:
    """n of a row, and how many of its runs there are as long as some are missing."""
    if row["word"] == stats.NOT_RUN and row["planned"] and row["runs"] == row["planned"] and not row["timed"]:
        return f"{row['n']} (waits for a search)"
    return str(row["n"]) + (f" ({row['runs']} of {row['planned']} runs)" if row["runs"] < row["planned"] else "")
