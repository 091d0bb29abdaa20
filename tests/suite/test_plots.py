"""Figures: one colour per method, an error bar where there is an interval, the paper hollow only where comparable and
beside ours, the numbers in a CSV, and nothing where there is no number of ours."""

import csv
import inspect
import json
import re
from itertools import combinations

import numpy as np
import pytest
from claim_runs import artifact
from suite_records import runs_of

from dpngd import methods
from dpngd.methods import METHODS, baselines
from dpngd.suite import claims, figures, motivation, own_data, paths, plots, profiles, rules, stats, tables
from dpngd.suite.rules import Chi, Theory, varying
from dpngd.suite.runs import Runs

QUICK, CPU, PAPER = (profiles.load(name) for name in ("quick", "cpu", "paper"))


def made(profile, artifact, **kwargs):
    order = list(METHODS)
    return runs_of(profile.configs(artifact), lambda c: 50 + 2 * order.index(c.method) + 0.4 * c.seed + c.epsilon,
                   **kwargs)


def hollows(figure):
    return [line for ax in figure.axes for line in ax.lines if line.get_markerfacecolor() == "white"]


def test_methods_of_one_figure_have_colours_that_differ():
    main = [*baselines(), "dp-ngd"]
    for a, b in combinations(main, 2):
        assert plots.colour(a) != plots.colour(b)
        assert METHODS[a].marker != METHODS[b].marker
    table_2 = {plots.colour(m) for m in {c.method for c in CPU.configs("utility_table")}}
    assert len(table_2) == 7
    assert methods.BLUE not in table_2, "that of the arms"
    known = (methods.BLACK, methods.SKY, methods.ORANGE, methods.GREEN, methods.BLUE, methods.VERMILION, methods.PURPLE,
             methods.INDIGO)
    assert {plots.colour(m) for m in METHODS} <= set(known)


def test_a_mean_has_its_interval_and_one_run_has_none():
    figure, (ax,) = plots.new()
    plots.point(ax, 0, stats.mean([1.0, 2.0, 3.0]), "dp-ngd")
    plots.point(ax, 1, stats.mean([5.0]), "dp-sgd")
    plots.point(ax, 2, stats.NOTHING, "gep")
    assert len(ax.containers) == 2
    bars = [c.lines[2] for c in ax.containers]
    low, high = bars[0][0].get_segments()[0][:, 1]
    e = stats.mean([1.0, 2.0, 3.0])
    assert (low, high) == pytest.approx((e.low, e.high))
    assert bars[1] == ()
    figure.canvas.draw()


def test_the_papers_accuracies_stand_beside_its_own_network_only():
    assert not hollows(figures.utility(made(QUICK, "utility_table")))
    cpu, paper = (figures.utility(made(p, "utility_table")) for p in (CPU, PAPER))
    leads, accuracies = 15 * 4, 15 * 5
    assert len(hollows(cpu)) == leads, "leads over DP-SGD only: the small network's accuracies are not the paper's"
    assert len(hollows(paper)) == leads + accuracies
    top = {round(float(line.get_ydata()[0]), 2) for ax in paper.axes[:3] for line in ax.lines
           if line.get_markerfacecolor() == "white"}
    assert {60.78, 84.65, 62.95} <= top


@pytest.fixture(scope="module")
def valley():
    return motivation.valley(T=25)


@pytest.fixture(scope="module")
def theory():
    chi = Chi("a bin", 1.0, 100)
    return Theory(spectrum=[(chi, 0.1, 10.0), (chi, 1.0, 1.0)], predicted=[(0.1, 10.0), (1.0, 1.0)],
                  kl=[{"quadratic": 0.1, "realised": 0.1, "bound": 0.2, "clipped": i > 0} for i in range(2)],
                  steps=[{"share": s, "squared": 1 / s, "bound": 1.0} for s in (0.5, 1.0)])


HELPERS = {"dots", "curves", "by_setting"}  # figures are made with them


def test_every_figure_draws_and_leaves_its_numbers(tmp_path, valley, theory):
    robustness = made(QUICK, "robustness")
    run = made(QUICK, "utility_table").where(method="dp-ngd")
    rates = own_data.rate_configs(4.0, [0, 1], 0.25)
    drawn = {
        "one_run": figures.one_run(*next(iter(run.each()))),
        "trajectories": figures.trajectories(valley),
        "theorem": figures.theorem(theory),
        "schedule": figures.schedule(**tables.schedule_of(CPU)),
        "canary": figures.canary(json.loads(paths.AUDIT.read_text(encoding="utf-8"))),
        "trials": figures.trials(made(QUICK, "tuning")),
        "spectra": own_data.draw_spectra(own_data.spectra(["noise"])),
        "rates": own_data.draw_rates(runs_of(rates, lambda c: 50.0 + c.seed)),
        "utility": figures.utility(made(QUICK, "utility_table")),
        "convergence": figures.convergence(made(QUICK, "convergence")),
        "sizes": figures.sizes(made(QUICK, "sample_efficiency")),
        "sources": figures.sources(made(QUICK, "sources")),
        "arms": figures.arms(made(CPU, "ablation_decoupling"), "ablation_decoupling"),
        "bound": figures.bound(runs_of(artifact("bound"), lambda c: 50 + c.eta + 0.1 * c.seed)),
        "lead": figures.lead(made(CPU, "utility_table")),
        "two rates": figures.arms(made(CPU, "ablation_clipping"), "ablation_clipping",
                                  made(CPU, "ablation_clipping_equal")),
        "pretraining": figures.pretraining(made(CPU, "pretraining")),
        "networks": figures.networks(made(CPU, "networks")),
        "views": figures.views(made(CPU, "views")),
        "whole": figures.whole(made(CPU, "whole"), made(CPU, "utility_table")),
        "releases": figures.releases(made(CPU, "releases")),
        "floors": figures.floors(made(QUICK, "ablation_floor")),
        "overhead": figures.overhead(made(QUICK, "overhead")),
        "robustness": figures.robustness(robustness, {a: varying(robustness, a) for a in ("T_cur", "p", "T1")}),
    }
    every = {name for name, f in vars(figures).items() if inspect.isfunction(f) and f.__module__ == figures.__name__
             and inspect.signature(f).return_annotation == "Figure"}
    assert every - HELPERS <= set(drawn)
    for name, figure in drawn.items():
        assert not plots.is_empty(figure), name
        plots.stamp(figure, "profile quick, commit abc")
        plots.save(figure, tmp_path, name)
        svg = (tmp_path / f"{name}.svg").read_text(encoding="utf-8")
        assert "commit abc" in svg
        assert not re.search(r"<dc:date>|<cc:Agent>.*Matplotlib v", svg)
        assert (tmp_path / f"{name}.png").stat().st_size > 5000
        rows = numbers(tmp_path / f"{name}.csv")
        assert rows, name
        assert all(row["series"] and row["at"] and row["value"] for row in rows), name
        assert (tmp_path / f"{name}.csv").stat().st_size < 200_000, name


def numbers(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_the_csv_has_what_is_drawn(tmp_path):
    runs = scattered(CPU, "utility_table")
    plots.save(figures.lead(runs), tmp_path, "lead")
    rows = numbers(tmp_path / "lead.csv")
    assert {row["whose"] for row in rows} == {"ours", "the paper's"}
    first = next(row for row in rows if row["series"] == "DP-NGD" and row["whose"] == "ours")
    line = next(tables.leads(runs).itertuples())
    assert (first["panel"], first["at"], first["shown"]) == ("CIFAR-10, small network", "ε = 1",
                                                             "points above the best baseline")
    assert [float(first[k]) for k in ("value", "low", "high")] == pytest.approx([line.lead, line.low, line.high], 1e-4)
    assert first["n"] == "8"


def some(profile, artifact, keep, accuracy=lambda c: 50.0 + c.seed % 7):
    """Runs of an artifact of which only those exist that `keep` names."""
    configs = profile.configs(artifact)
    return Runs(configs, runs_of([c for c in configs if keep(c)], accuracy).found)


@pytest.mark.parametrize("name", ["releases", "ablation_ours", "ablation_clipping", "overhead", "bound"])
def test_runs_that_nothing_can_be_compared_with_are_no_figure(name):
    """The paper's numbers alone, one method alone and axes without a mark are left out, though runs exist."""
    kept = rules.broken_bounds(Runs(CPU.configs("bound"), {}))[1.0][0]  # factor 1: nothing is broken
    runs = some(CPU, name, lambda c: all(getattr(c, k) == v for k, v in kept.items()) if name == "bound" else
                c.method in ("dp-ngd", "dp-sgd-pt") and c.T_cur in (None, 8))
    assert len(runs)
    assert plots.is_empty(DRAWN[name](runs))


def test_a_row_and_a_panel_without_a_number_say_so_and_have_none_of_the_papers():
    runs = some(CPU, "ablation_decoupling", lambda c: c.method in ("dp-ngd", "dp-sgd-pt") and c.epsilon == 2)
    figure = figures.arms(runs, "ablation_decoupling", some(CPU, "ablation_decoupling_equal", lambda c: False))
    first, second = figure.axes
    assert [t.get_text() for t in first.texts].count("not run yet") == 4
    assert [t.get_text() for t in second.texts] == ["not run yet"]
    assert len(hollows(figure)) == 1
    legend = [t.get_text() for t in figure.legends[0].get_texts()]
    assert legend == ["the paper, its own network"], "no mark is explained that is not drawn"
    full = figures.arms(made(CPU, "ablation_decoupling"), "ablation_decoupling", made(CPU, "ablation_decoupling_equal"))
    assert "at the rate of the equation" in [t.get_text() for t in full.legends[0].get_texts()]


def test_n_is_that_of_what_is_drawn():
    def keep(c):  # a baseline with two seeds, in a cell where nothing can be compared
        return c.epsilon == 1 or (c.epsilon == 2 and c.method == "gep" and c.seed % 8 < 2)

    runs = some(CPU, "utility_table", keep)
    assert "n = 8 seeds (preliminary" in figures.lead(runs).texts[0].get_text()
    assert "n = 2 to 8 seeds" in figures.utility(runs).texts[0].get_text()


def test_few_seeds_do_not_set_an_axis_that_many_are_on():
    many, few = stats.mean([50.0, 51.0, 50.5, 50.2, 50.8, 50.1]), stats.mean([48.0, 52.0])
    alone = plots.limits([many.mean], [many], 0.2, 1.0)
    assert plots.limits([many.mean, few.mean], [many, few], 0.2, 1.0)[1] == pytest.approx(alone[1])
    assert plots.limits([few.mean], [few], 0.2, 1.0)[1] > few.mean + 1, "where all have few, theirs count"


def test_arrows_are_explained_where_there_is_one():
    def note(values):
        figure, (ax,) = plots.new()
        plots.point(ax, 0, stats.mean(values), "dp-ngd")
        plots.point(ax, 1, stats.mean([50.0, 50.5, 51.0]), "dp-ngd")
        plots.settle(ax, [50.0, 50.5], room=3, intervals=[stats.mean(values)])
        plots.note(figure, "A note.")
        return figure.texts[0].get_text()

    assert "Arrow" in note([20.0, 51.0, 82.0])
    assert note([50.0, 50.5, 51.0]) == "A note."


DRAWN = {"utility_table": figures.utility, "sources": figures.sources, "overhead": figures.overhead,
         "releases": figures.releases,
         "ablation_ours": lambda r: figures.arms(r, "ablation_ours"),
         "ablation_clipping": lambda r: figures.arms(r, "ablation_clipping"),
         "convergence": figures.convergence, "sample_efficiency": figures.sizes, "pretraining": figures.pretraining,
         "networks": figures.networks, "views": figures.views, "whole": lambda r: figures.whole(r, r),
         "bound": figures.bound, "ablation_floor": figures.floors, "tuning": figures.trials,
         "robustness": lambda r: figures.robustness(r, {a: varying(r, a) for a in ("T_cur", "p", "T1")})}


@pytest.mark.parametrize("name", [*DRAWN, "lead"])
def test_nothing_run_is_an_empty_figure_and_half_of_it_is_drawn(name):
    configs = CPU.configs("utility_table" if name == "lead" else name)
    draw = DRAWN.get(name, figures.lead)
    nothing = draw(runs_of(configs, lambda c: {}["none"]))
    assert plots.is_empty(nothing)
    nothing.canvas.draw()
    low = 3 if min(c.epsilon for c in configs) < 3 else 100
    some = draw(runs_of(configs, lambda c: {True: 50.0 + c.seed % 7}[c.epsilon < low and c.method != "dp-sgd-pt"]))
    some.canvas.draw()
    if name not in ("pretraining", "lead", "overhead", "releases"):  # these need the method that is missing
        assert not plots.is_empty(some)


def test_what_leaves_the_axis_ends_in_an_arrow_with_its_number():
    _, (ax,) = plots.new()
    for x, values in enumerate(([50.0, 50.5, 51.0], [52.0, 52.5, 53.0], [20.0, 51.0, 82.0])):
        plots.point(ax, x, stats.mean(values), "dp-ngd")
    estimates = [stats.mean(v) for v in ([50.0, 50.5, 51.0], [52.0, 52.5, 53.0], [20.0, 51.0, 82.0])]
    plots.settle(ax, [e.mean for e in estimates], intervals=estimates)
    low, high = ax.get_ylim()
    assert high - low < 8, "the wide interval does not flatten the others"
    wide = estimates[2]
    assert [t.get_text() for t in ax.texts] == [f"{wide.low:.1f}", f"{wide.high:.1f}"]
    arrows = {line.get_marker(): line.get_xydata()[0] for line in ax.lines if line.get_marker() in ("v", "^")}
    assert arrows["v"] == pytest.approx([2.0, low])
    assert arrows["^"] == pytest.approx([2.0, high])


def test_a_diverged_arm_does_not_set_the_axis():
    runs = runs_of(CPU.configs("ablation_clipping", epsilons=[2.0]),
                   lambda c: {"dp-ngd": 50.0, "dp-ngd-post": 48.0, "dp-ngd-pre": None}[c.method] and
                   {"dp-ngd": 50.0, "dp-ngd-post": 48.0}[c.method] + 0.1 * (c.seed % 5))
    figure = figures.arms(runs, "ablation_clipping")
    (ax,) = figure.axes
    assert ax.get_xlim()[1] < 16
    texts = [t.get_text() for t in ax.texts]
    assert "8 of 8 diverged: chance" in texts
    assert "40.2" in texts, "and an arrow says how far away it is: 50.2 less chance"


def test_the_lead_is_the_claims_and_the_papers_is_beside_it():
    runs = made(CPU, "utility_table")
    table = tables.leads(runs)
    decided = {p.name: p.estimate for p in rules.best_in_every_cell(runs).parts}
    order = [m for m in METHODS if METHODS[m].baseline]
    for row in table[table["name"] == "dp-ngd"].itertuples():
        claimed = decided[f"{row.data} ε={row.epsilon:g} over {order[-1]}"]  # the last has the highest mean here
        assert (row.lead, row.low, row.high) == pytest.approx((claimed.mean, claimed.low, claimed.high))
        assert row.paper == pytest.approx(claims.paper_leads()[row.data, row.epsilon])
    free = table[table["name"] == "dp-ngd-free"]
    assert len(free) == 15
    assert free["paper"].isna().all()
    assert len(hollows(figures.lead(runs))) == 15
    assert figures.lead(runs, "finalists by mean").dpngd_head.endswith("at each privacy budget, finalists by mean")


def scattered(profile, artifact):
    """Runs whose paired differences scatter over seeds, more in some cells than in others."""
    order = list(METHODS)

    def accuracy(c):
        noise = np.random.default_rng([int(c.key(), 16) % 2**32])
        return 50 + 1.5 * order.index(c.method) % 7 + (0.5 + 0.1 * c.epsilon) * noise.normal()
    return runs_of(profile.configs(artifact), accuracy)


def bars_of(figure):
    """(mean, low, high) of every bar that is drawn."""
    return [tuple(bar[1:4]) for ax in figure.axes for bar in plots.drawn(ax)]


CLAIMED = {  # claims whose parts are bars of a figure
    "private-curvature": "ablation_decoupling", "public-curvature": "ablation_decoupling",
    "clipping-space": "ablation_clipping", "mapping-back": "ablation_ours", "kl-needs-curvature": "kl_maps",
    "kl-step-alone": "kl_maps", "best-everywhere": "utility_table", "whole-set": "whole",
    "other-networks": "networks", "views": "views", "any-source": "sources", "few-images": "sample_efficiency",
    "exponent": "robustness", "rare-updates": "robustness",
    "often-released": "releases", "clamp-and-labels": "ablation_ours"}


@pytest.mark.parametrize("name", CLAIMED)
def test_bars_are_the_intervals_that_decide_the_claim(name):
    (claim,) = (c for c in claims.all_claims() if c.id == name)
    source = CLAIMED[name]
    runs = scattered(CPU, source)
    figure = DRAWN.get(source, lambda r: figures.arms(r, source))(runs)
    drawn = bars_of(figure)
    drawn += [(-mean, -high, -low) for mean, low, high in drawn]  # a figure may have it the other way round
    parts = claim.rule(runs.where(method=list(claim.methods)) if claim.methods else runs).parts
    assert parts
    assert all(0 < p.estimate.high - p.estimate.low < 20 for p in parts)
    for p in parts:
        if name == "best-everywhere" and not p.name.endswith("over dp-sgd"):
            continue  # the figure has the leads over DP-SGD
        e = p.estimate
        assert any(bar == pytest.approx((e.mean, e.low, e.high)) for bar in drawn), p.name


def test_cells_that_hold_after_holm_have_a_tick():
    runs = scattered(CPU, "utility_table").where(method=[*baselines(), "dp-ngd"])
    decision = rules.best_in_every_cell(runs)
    holds = figures.held(decision)
    assert len(holds) == decision.verdict.held
    ticks = [t for ax in figures.lead(runs).axes for t in ax.texts if t.get_text() == "✓"]
    assert len(ticks) == len(holds)
    assert not figures.marks_held(scattered(QUICK, "utility_table"), rules.best_in_every_cell), "digits decide nothing"


def test_panels_of_differences_share_one_scale():
    for figure in (figures.arms(scattered(CPU, "ablation_decoupling"), "ablation_decoupling"),
                   figures.arms(scattered(CPU, "ablation_ours"), "ablation_ours")):
        assert len({ax.get_xlim() for ax in figure.axes}) == 1
    bottom = figures.utility(scattered(CPU, "utility_table")).axes[3:]
    assert len({ax.get_xlim() for ax in bottom}) == 1


def test_the_floors_say_what_the_claim_found_of_the_loss():
    runs = runs_of(CPU.configs("ablation_floor"), lambda c: None if c.method == "dp-ngd-no-floor" else 50.0 + c.seed)
    for config, record in runs.each():
        if config.method != "dp-ngd-no-floor":
            high = 0.1 * (config.method == "dp-ngd-fixed-floor") + 0.01 * (config.seed % 3)
            record["train_loss"] = [2.0 + high * (1 + config.seed % 2)] * config.T
    figure = figures.floors(runs)
    (part,) = rules.lower_loss("dp-ngd", "dp-ngd-fixed-floor")(runs).parts
    assert any(rules.part_said(part, "", 3) in t.get_text() for t in figure.axes[1].texts)
    assert figures._about(83_886.1) == "80,000"


def test_the_matrix_has_the_best_in_bold():
    table = tables.accuracy(made(CPU, "utility_table"), "utility_table")
    shown = tables.matrix(table)
    assert list(shown.columns) == ["data set", "method", "ε = 1", "ε = 2", "ε = 4", "ε = 6", "ε = 8"]
    assert len(shown) == 3 * 7
    best = shown[shown["ε = 1"].str.startswith("**")]
    assert list(best["method"]) == [plots.label("dp-ngd-free")] * 3, "the last of the methods is made the best here"


def test_the_bench_is_told_with_goals_or_without():
    report = {"models": {"small": {"batch": 8, "contenders": {"dp-sgd": {"median": 1.0}, "dp-ngd": {"median": 1.1}}}},
              "ratio": {"small": {"dp_ngd_over_dp_sgd": 1.1, "opacus_over_dp_sgd": 1.5, "unknown": 3.0}}}
    shown, _, caption, _ = tables.bench_ratios(report)
    assert "no goals" in caption
    assert list(shown["all threads"]) == ["1.50", "1.10"]
    assert list(shown["the paper (RTX 3090)"]) == ["-", "2.69 and 2.93"]
    goals = {"dp_ngd_over_dp_sgd": {"small": 1.15}, "opacus_over_dp_sgd": {"small": 2.0}}
    told = tables.bench_ratios({**report, "goals": goals})[0]
    assert list(told["goal"]) == ["≥ 2", "≤ 1.15"]
    assert list(told["reached"]) == ["no", "yes"]
    one = {"ratio": {"small": {"dp_ngd_over_dp_sgd": 1.3, "opacus_over_dp_sgd": 2.004}}}
    told = tables.bench_ratios({**report, "goals": goals, "threads": 2, "one_thread": one})[0]
    assert list(told["1 thread"]) == ["2.00", "1.30"]
    assert list(told["reached"]) == ["with 1 thread", "with 2 threads"]
    assert len(tables.bench_seconds(report)[0]) == 2
    assert tables.bench_ratios({})[0].empty
    assert tables.bench_seconds({})[0].empty


def test_the_same_data_give_the_same_files(tmp_path):
    for folder in ("a", "b"):
        plots.save(figures.utility(made(QUICK, "utility_table")), tmp_path / folder, "f")
    for suffix in ("png", "svg"):
        assert (tmp_path / "a" / f"f.{suffix}").read_bytes() == (tmp_path / "b" / f"f.{suffix}").read_bytes()


def test_an_axis_of_accuracies_stays_within_what_they_can_be():
    _, (ax,) = plots.new()
    wide = stats.mean([5.0, 20.0, 95.0])  # its interval is far wider than 0 to 100
    plots.keep(ax, "a", [0], [40.0])
    plots.settle(ax, [40.0, 5.0], intervals=[wide], within=plots.PERCENT)
    assert ax.get_ylim() == (0.0, pytest.approx(75 + 0.06 * 35))
    plots.settle(ax, [40.0, 5.0], intervals=[wide])
    assert ax.get_ylim()[0] < -30


def test_end_labels_do_not_hide_one_another():
    figure, (ax,) = plots.new()
    ax.set_ylim(0, 10)
    plots.end_labels(ax, [(1, 5.0, "a", "k"), (1, 5.1, "b", "k"), (1, 5.05, "c", "k")])
    heights = sorted(t.xyann[1] for t in ax.texts)
    assert np.diff(heights).min() >= 0.7
    figure.canvas.draw()


def test_tables_say_what_is_missing_and_what_diverged():
    runs = runs_of(QUICK.configs("ablation_floor", seeds=[0, 1]),
                   lambda c: {"dp-ngd": 90.0 + c.seed, "dp-ngd-no-floor": None}[c.method])
    shown = tables.shown(tables.accuracy(runs, "ablation_floor")).set_index("method")["accuracy, 95% interval"]
    assert shown["DP-NGD"] == "90.5 ± 6.4 (n=2)"
    assert shown["no floor"] == "10.0 (n=2, 2 diverged: chance)"
    assert shown["fixed floor"] == "not run"


def test_tables_have_the_papers_numbers():
    table = tables.accuracy(made(CPU, "utility_table"), "utility_table").set_index(["name", "data", "epsilon"])
    assert table.loc[("dp-ngd", "svhn", 1.0), "paper"] == 84.65
    assert tables.paper_accuracy("ablation_floor", "dp-ngd-fixed-floor", "utkface", 2.0) == 68.53
    assert tables.paper_accuracy("utility_table", "dp-ngd", "digits", 1.0) is None


def test_the_motivation_figure_is_computed(valley):
    """Same start and number of steps; DP-NGD ends nearer to the minimum, and lower."""
    sgd, ngd = valley.paths["dp-sgd"], valley.paths["dp-ngd"]
    assert np.allclose(sgd[0], ngd[0])
    assert len(sgd) == len(ngd) == 26
    away = {m: np.linalg.norm(p[-1] - valley.optimum) for m, p in valley.paths.items()}
    assert away["dp-ngd"] < 0.5 * away["dp-sgd"]
    assert (valley.losses["dp-ngd"][:, -1] < 0.95 * valley.losses["dp-sgd"][:, -1]).all(), "in every draw of the noise"
    assert {m: p.shape for m, p in valley.every.items()} == {m: (8, 26, 2) for m in ("dp-sgd", "dp-ngd")}
    assert valley.sigma > 1
    figure = figures.trajectories(valley)
    figure.canvas.draw()
    thick = {m: max(ax.lines, key=lambda line: line.get_linewidth() * (len(line.get_xdata()) > 1))
             for m, ax in zip(("dp-sgd", "dp-ngd"), figure.axes, strict=False)}
    for m, line in thick.items():
        assert np.allclose(line.get_xydata(), valley.every[m].mean(0)), "the mean path, as the mean loss beside it"
    assert all(valley.lowest <= losses.min() for losses in valley.losses.values())


def test_dp_sgd_zigzags_and_dp_ngd_does_not(valley):
    def turns(path):
        """Share of steps whose component across the valley changes sign."""
        across = np.diff(path, axis=0) @ np.array(motivation.STEEP)
        return np.mean(np.sign(across[1:]) != np.sign(across[:-1]))

    assert turns(valley.paths["dp-sgd"]) > 2 * turns(valley.paths["dp-ngd"])


def test_the_schedule_figure_has_the_schedule():
    figure = figures.schedule(0.3, 0.075, 40)
    t, floor = figure.axes[0].lines[0].get_data()
    assert floor[0] == pytest.approx(0.3)
    assert floor[-1] == pytest.approx(0.3)
    assert min(floor) == pytest.approx(0.075, rel=1e-3)
    assert t[-1] == 40


def test_the_schedule_is_of_a_cell_whose_floor_moves():
    shown = tables.schedule_of(CPU)
    assert shown["lambda_base"] < shown["lambda_safe"]
    cells = {(c.data, c.epsilon): c for c in CPU.configs("utility_table", methods=["dp-ngd"])}
    constant = [e for (d, e), c in cells.items() if d == "cifar10" and c.lambda_base == c.lambda_safe]
    said = f"On CIFAR-10 at ε = {' and '.join(f'{e:g}' for e in constant)} the search chose a constant floor"
    assert shown["said"].startswith(said) == bool(constant)
    figure = figures.schedule(**shown)
    assert figure.axes[0].get_title(loc="left") == shown["where"]
    assert len(figures.schedule(0.3, 0.3, 40).axes[0].texts) == 1, "one label where both floors are one"


def test_labels_are_apart_and_below_the_top():
    assert plots.apart([1.0, 1.1, 5.0], 1.0, 10.0) == pytest.approx([0.55, 1.55, 5.0]), "around their middle"
    assert plots.apart([1.0, 2.2, 2.3], 1.0, 10.0) == pytest.approx([0.8333, 1.8333, 2.8333], abs=1e-3)
    assert plots.apart([7.9, 8.0, 8.1], 1.0, 8.5) == pytest.approx([6.5, 7.5, 8.5])
    assert plots.apart([3.0], 1.0, 8.0) == [3.0]
