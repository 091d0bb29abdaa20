"""The paper's claims as data: sentence, place, published numbers, the runs that decide it, and the rule.

`published()` numbers are computed from params/published.yaml, ours from stored runs; nothing is typed here but the
words. A claim with a `question` is ours: the paper does not answer it, and its paper column is empty.
"""

from __future__ import annotations

import functools
import operator
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


@dataclass(frozen=True)
class Claim:
    """One sentence that can turn out wrong."""

    id: str
    notebook: str
    sentence: str
    place: str
    paper: str  # the published numbers, in words
    source: str  # the artifact whose runs decide it (or several, a+b), or what was measured: one of MEASURED
    rule: Callable[[Any], Decision]
    question: str = ""  # asked by us, not by the paper
    timed: bool = False  # rests on a clock: its verdict may differ from one run to the next
    steady: bool = False  # under `quick` its verdict has a margin that no other machine's rounding bridges: checked


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


def _table(section: str, *methods: str) -> str:
    t = published()[section]
    return "; ".join(f"{m} " + ", ".join(f"{v:.2f}" for v in t["mean"][m]) for m in methods) + " at ε=" + ", ".join(
        f"{e:g}" for e in t["epsilons"])


def _axis(name: str) -> str:
    axis = published()["robustness"]["axes"][name]
    low, high = min(axis["mean"]), max(axis["mean"])
    return f"{low:.2f} to {high:.2f} over {name} {axis['values'][0]:g} to {axis['values'][-1]:g}"


def overhead_rows() -> dict[str, dict[str, list]]:
    """Table 5 by data set and method: [seconds per step, steps, hours]."""
    found: dict[str, dict[str, list]] = {}
    for data, _, method, *numbers in published()["overhead"]["rows"]:
        found.setdefault(data, {})[method] = numbers
    return found


def paper_step_cost() -> dict[str, float]:
    """Table 5 by data set: seconds of a DP-NGD step over those of a DP-SGD-PT step."""
    return {data: rows["dp-ngd"][0] / rows["dp-sgd-pt"][0] for data, rows in overhead_rows().items()}


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
    small = _text("robustness", "change over p and over T1 below")
    t_cur = paper["robustness"]["axes"]["T_cur"]
    drop = _text("robustness", "drop from T_cur 1 to 16 below")
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
              paper["utility_table"]["place"], _leads(), "utility_table", rules.best_in_every_cell),
        Claim("stricter-larger", "01_utility_table",
              "The advantage is larger under stricter privacy.",
              paper["utility_table"]["place"], _small_epsilon(), "utility_table", rules.larger_when_stricter),
        Claim("same-privacy", "01_utility_table",
              "DP-NGD costs exactly the privacy of DP-SGD.",
              paper["privacy_table"]["place"], "same σ and q, same (ε, δ)", "utility_table", rules.same_privacy,
              steady=True),
        Claim("other-networks", "01_utility_table",
              "DP-NGD gains over DP-SGD on another network and with augmentation.",
              "our question", "", "networks", rules.over_each(("model", "K"), "dp-sgd"),
              question="Does the gain hang on the network, or on training without augmentation?"),
        Claim("most-views", "01_utility_table",
              "At half its tuned rate DP-NGD is ahead of DP-SGD with the most views of an image.",
              "our question", "", "networks+networks_half", rules.with_most_views(rules.ahead_at_half_rate("dp-sgd")),
              question="And with augmentation, where DP-NGD stays away from the rate at which it turns unstable?"),
        # ---- Notebook 02: Figure 2, accuracy against steps
        Claim("every-budget", "02_convergence_curves",
              "DP-NGD is more accurate at every step budget.",
              paper["convergence"]["place"], "every point of the figure", "convergence", rules.higher_at_every_budget),
        Claim("fewer-steps", "02_convergence_curves",
              "DP-NGD reaches the baselines' peak in a fraction of the steps.",
              paper["convergence"]["place"], "; ".join(f"{d} {v:g} times fewer" for d, v in fewer.items()),
              "convergence", rules.fewer_steps(fewer)),
        Claim("fraction-of-steps", "02_convergence_curves",
              "In the paper's fraction of the steps DP-NGD is ahead of the baselines' peak.",
              "our question", "", "convergence+fraction", rules.at_a_fraction(fewer),
              question="The budgets above double, so that ratio is coarse: does DP-NGD do it with "
                       "exactly 1/2.3 and 1/10?"),
        Claim("own-budget", "02_convergence_curves",
              "With every method at its own best step budget DP-NGD is ahead.",
              "our question", "", "convergence", rules.ahead_at_own_budget,
              question="Is DP-NGD only faster, or also better when every method may take the steps it needs?"),
        Claim("lead-fades", "02_convergence_curves",
              "The lead shrinks as the step budget grows.",
              "our question", "", "convergence", rules.lead_fades,
              question="Is the lead a matter of speed: is it larger the fewer steps there are?"),
        # ---- Notebook 03: Figure 3, public images
        Claim("few-images", "03_public_sample_efficiency",
              "DP-NGD hardly depends on how many public images there are.",
              paper["sample_efficiency"]["place"], f"less than {fluctuation} point from 50 to 5,000 images",
              "sample_efficiency", rules.spread("public_size", fluctuation)),
        Claim("baselines-need-images", "03_public_sample_efficiency",
              "The baselines get better with more public images.",
              paper["sample_efficiency"]["place"], "all three improve steadily", "sample_efficiency",
              rules.baselines_need_images),
        Claim("ahead-with-images", "03_public_sample_efficiency",
              "Even with the most public images they stay behind.",
              paper["sample_efficiency"]["place"], "all three below DP-NGD at 5,000 images", "sample_efficiency",
              rules.ahead_with_most_images, steady=True),
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
              "Curvature paid from the privacy budget falls below DP-SGD-PT.",
              paper["ablation_decoupling"]["place"],
              _table("ablation_decoupling", "dp-sgd-pt", "dp-ngd-private-20", "dp-ngd-private-50"),
              "ablation_decoupling",
              rules.chain(("dp-sgd-pt", "dp-ngd-private-20"), ("dp-sgd-pt", "dp-ngd-private-50"))),
        Claim("often-released", "04_ablations",
              "Released at every step, private curvature falls below DP-SGD-PT.",
              "our question", "", "releases", rules.below_when_released("dp-sgd-pt"),
              question="Does curvature paid from the budget do well only because it is released a few times?"),
        Claim("public-curvature", "04_ablations",
              "Curvature from public images stays above DP-SGD-PT.",
              paper["ablation_decoupling"]["place"], _table("ablation_decoupling", "dp-ngd", "dp-sgd-pt"),
              "ablation_decoupling", rules.chain(("dp-ngd", "dp-sgd-pt"))),
        Claim("clipping-space", "04_ablations",
              "Clipping whitened beats clipping after, and after beats before.",
              paper["ablation_clipping"]["place"], _table("ablation_clipping", "dp-ngd", "dp-ngd-post", "dp-ngd-pre"),
              "ablation_clipping", rules.chain(("dp-ngd", "dp-ngd-post"), ("dp-ngd-post", "dp-ngd-pre"))),
        Claim("half-rate-arms", "04_ablations",
              "At half its tuned rate DP-NGD is ahead of DP-SGD-PT and of its own arms.",
              "our question", "", "ablation_decoupling+ablation_clipping+ablation_ours+rates",
              rules.half_rate_over(rules.rivals()),
              question="What do Tables 3 and 4 say where DP-NGD stays away from the rate at which it turns unstable?"),
        Claim("no-floor", "04_ablations",
              "Without a floor training diverges.",
              paper["ablation_floor"]["place"], "NaN within the first few steps", "ablation_floor",
              rules.diverges("dp-ngd-no-floor"), steady=True),
        Claim("dynamic-floor", "04_ablations",
              "The dynamic floor beats the fixed one.",
              paper["ablation_floor"]["place"], f"{_floor('dp-ngd'):.2f} against {_floor('dp-ngd-fixed-floor'):.2f}",
              "ablation_floor", rules.chain(("dp-ngd", "dp-ngd-fixed-floor"))),
        Claim("dynamic-loss", "04_ablations",
              "From mid-training on the dynamic floor has the lower training loss.",
              paper["ablation_floor"]["place"], "the whole curve", "ablation_floor",
              rules.lower_loss("dp-ngd", "dp-ngd-fixed-floor")),
        Claim("mapping-back", "04_ablations",
              "Mapping back with F^-1/2 helps: one-sided whitening is worse.",
              "our question", "", "ablation_ours", rules.chain(("dp-ngd", "dp-ngd-one-sided")),
              question="Is the second F^-1/2, which maps the noisy sum back, worth its noise?"),
        Claim("clamped-share", "04_ablations",
              "Most eigenvalues lie on the floor all through a run.",
              "our question", "", "ablation_floor", rules.mostly_clamped, steady=True,
              question="What does the share of clamped eigenvalues do over a run?"),
        Claim("open-choices", "04_ablations",
              "Clamping factors or product, and the Fisher's labels, change under 1 point.",
              "our question", "", "ablation_ours", rules.alike(arms("clamping", "labels"), 1.0),
              question="Does it matter whether factors or their product are clamped, and which labels "
                       "the Fisher takes?"),
        Claim("open-choices-half", "04_ablations",
              "At half the rate those choices change under 1 point.",
              "our question", "", "open_choices", rules.alike(arms("clamping", "labels"), 1.0),
              question="And where all of them stay away from the rate at which DP-NGD turns unstable?"),
        # ---- Notebook 05: Table 5, time
        Claim("step-cost", "05_wallclock_overhead",
              "A DP-NGD step costs no more than the paper's multiple of DP-SGD-PT's.",
              paper["overhead"]["place"], "; ".join(f"{d} {v:.1f} times" for d, v in step_cost.items()), "overhead",
              rules.step_cost(step_cost), timed=True),
        Claim("step-cost-bench", "05_wallclock_overhead",
              "On the paper's networks, timed in turns, a DP-NGD step costs no more than that multiple either.",
              paper["overhead"]["place"], "; ".join(f"{d} {v:.1f} times" for d, v in step_cost.items()), "bench",
              rules.benched(min(step_cost.values())), timed=True),
        Claim("total-time", "05_wallclock_overhead",
              "Time to DP-SGD-PT's peak is comparable or lower.",
              paper["overhead"]["place"], "; ".join(f"{d} {v:.2f} times as fast" for d, v in total.items()),
              "overhead", rules.total_time(total), timed=True),
        # ---- Notebook 06: Table 6, what has to be tuned
        Claim("equal-trials", "06_hyperparameter_robustness",
              "DP-SGD stays behind when it gets as many trials.",
              "our question", "", "tuning", rules.best_trial_ahead("dp-sgd"),
              question="Does the gain survive when DP-SGD gets the same number of trials?"),
        Claim("half-rate", "06_hyperparameter_robustness",
              "At half its tuned rate DP-NGD is ahead of DP-SGD.",
              "our question", "", "rates", rules.ahead_at_half_rate("dp-sgd"),
              question="Where DP-NGD's tuned rate turns out to be unstable: is the method at fault, or the rate?"),
        Claim("rare-updates", "06_hyperparameter_robustness",
              "Curvature may be 16 steps old.",
              paper["robustness"]["place"], f"less than {drop} points from T_cur 1 to 16", "robustness",
              rules.spread("T_cur", drop, upto=16)),
        Claim("too-rare", "06_hyperparameter_robustness",
              "At 32 steps accuracy declines.",
              paper["robustness"]["place"],
              f"{_text('robustness', 'accuracy at T_cur 32'):.2f} against "
              f"{t_cur['mean'][t_cur['values'].index(8)]:.2f}",
              "robustness", rules.drop("T_cur", 8, 32)),
        Claim("once-only", "06_hyperparameter_robustness",
              "Curvature that is hardly ever estimated anew costs accuracy.",
              "our question", "", "robustness", rules.rarest_curvature_costs,
              question="Must the curvature follow the weights, or would that of the first ones do?"),
        Claim("exponent", "06_hyperparameter_robustness",
              "The exponent p hardly matters.",
              paper["robustness"]["place"], _axis("p"), "robustness", rules.spread("p", small)),
        Claim("warm-up", "06_hyperparameter_robustness",
              "The warm-up T1 hardly matters.",
              paper["robustness"]["place"], _axis("T1"), "robustness", rules.spread("T1", small)),
    )


ROW = ("id", "notebook", "sentence", "question", "place", "paper", "ours", "brief", "timed", "verdict", "n", "runs",
       "planned", "rule", "mean", "low", "high")


def of_notebook(notebook: str) -> list[Claim]:
    return [c for c in all_claims() if c.notebook == notebook]


def decide(claim: Claim, sources: Mapping[str, Any]) -> dict[str, Any]:
    """A claim's row in claims.json. As long as planned runs are missing, "direction only" is the most it can say; with
    fewer than half of them it says nothing yet, whatever those few show."""
    parts = [sources.get(name) for name in claim.source.split("+")]
    source = None if None in parts else functools.reduce(operator.add, parts)  # of several, none may be missing
    runs, planned = (len(source), len(source.configs)) if isinstance(source, Runs) else (0, 0)
    if source is None or (isinstance(source, Runs) and not runs):
        decision = Decision(stats.Verdict(stats.NOT_RUN, None, ""), stats.NOT_RUN, 0)
    else:
        decision = claim.rule(source)
    word, e = decision.word, decision.verdict.estimate
    if 2 * runs < planned:
        word = stats.NOT_RUN
    elif word == stats.REPRODUCED and runs < planned:
        word = stats.DIRECTION
    values = (claim.id, claim.notebook, claim.sentence, claim.question, claim.place, claim.paper, decision.ours,
              decision.brief or decision.ours, claim.timed, word, decision.n, runs, planned, decision.verdict.rule,
              *(finite_or_none(v) for v in ((e.mean, e.low, e.high) if e else (None, None, None))))
    return dict(zip(ROW, values, strict=True))


HELD = {stats.REPRODUCED: "It holds", stats.DIRECTION: "The runs lean that way, no more",
        stats.NOT_REPRODUCED: "It does not hold", stats.NOT_RUN: "Not run yet"}


def answer(row: Mapping[str, Any]) -> str:
    """What the runs say to a question of ours."""
    said = "" if row["verdict"] == stats.NOT_RUN else f": {row['ours']}"
    return f"{row['sentence']} {HELD[row['verdict']]}{said}{'' if said.endswith('.') else '.'}"


def seeds_text(row: Mapping[str, Any]) -> str:
    """n of a row, and how many of its runs there are as long as some are missing."""
    return str(row["n"]) + (f" ({row['runs']} of {row['planned']} runs)" if row["runs"] < row["planned"] else "")
