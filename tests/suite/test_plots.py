"""Figures: one colour a method, an error bar wherever there is an interval, the paper hollow only where comparable."""

import re
from itertools import combinations

import numpy as np
import pytest
from suite_records import runs_of

from dpngd.methods import METHODS, baselines
from dpngd.suite import figures, motivation, plots, profiles, stats, tables
from dpngd.suite.rules import varying

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
    assert {plots.colour(m) for m in METHODS} <= set(plots.OKABE_ITO.values())


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
    cells = 15 * 5
    assert len(hollows(cpu)) == cells, "leads only: the small network's accuracies are not the paper's"
    assert len(hollows(paper)) == 2 * cells
    top = {round(float(line.get_ydata()[0]), 2) for ax in paper.axes[:3] for line in ax.lines
           if line.get_markerfacecolor() == "white"}
    assert {60.78, 84.65, 62.95} <= top


def test_every_result_figure_draws(tmp_path):
    robustness = made(QUICK, "robustness")
    drawn = {
        "utility": figures.utility(made(QUICK, "utility_table")),
        "convergence": figures.curves(made(QUICK, "convergence"), "T", "steps", peak=True),
        "sizes": figures.curves(made(QUICK, "sample_efficiency"), "public_size", "images", log=True),
        "sources": figures.sources(made(QUICK, "sources")),
        "decoupling": figures.arms(made(CPU, "ablation_decoupling"), "ablation_decoupling"),
        "half_rate": figures.arms_at_half_rate(made(CPU, "ablation_clipping") + made(CPU, "rates")),
        "networks": figures.networks(made(CPU, "networks") + made(CPU, "networks_half")),
        "releases": figures.releases(made(CPU, "releases")),
        "open_choices": figures.arms(made(CPU, "open_choices"), "open_choices"),
        "floors": figures.floors(made(QUICK, "ablation_floor")),
        "overhead": figures.overhead(made(QUICK, "overhead")),
        "robustness": figures.robustness(robustness, {a: varying(robustness, a) for a in ("T_cur", "p", "T1")}),
    }
    for name, figure in drawn.items():
        plots.stamp(figure, "profile quick, commit abc")
        plots.save(figure, tmp_path, name)
        svg = (tmp_path / f"{name}.svg").read_text(encoding="utf-8")
        assert "commit abc" in svg
        assert not re.search(r"<dc:date>|<cc:Agent>.*Matplotlib v", svg)
        assert (tmp_path / f"{name}.png").stat().st_size > 5000


def test_nothing_run_draws_empty_panels_without_warnings():
    nothing = runs_of(CPU.configs("ablation_floor"), lambda c: {}["none"])
    figures.floors(nothing).canvas.draw()
    robustness = runs_of(CPU.configs("robustness"), lambda c: {}["none"])
    figures.robustness(robustness, {a: varying(robustness, a) for a in ("T_cur", "p", "T1")}).canvas.draw()
    for name in ("utility_table", "convergence", "sources", "ablation_clipping", "releases", "overhead"):
        runs = runs_of(CPU.configs(name), lambda c: {}["none"])
        figure = {"utility_table": figures.utility, "sources": figures.sources, "overhead": figures.overhead,
                  "releases": figures.releases, "ablation_clipping": lambda r: figures.arms(r, "ablation_clipping"),
                  "convergence": lambda r: figures.curves(r, "T", "steps", peak=True)}[name](runs)
        figure.canvas.draw()


def test_the_same_data_give_the_same_files(tmp_path):
    for folder in ("a", "b"):
        plots.save(figures.utility(made(QUICK, "utility_table")), tmp_path / folder, "f")
    for suffix in ("png", "svg"):
        assert (tmp_path / "a" / f"f.{suffix}").read_bytes() == (tmp_path / "b" / f"f.{suffix}").read_bytes()


def test_an_axis_of_accuracies_stays_within_what_they_can_be():
    _, (ax,) = plots.new()
    wide = stats.mean([5.0, 20.0, 95.0])  # its interval is far wider than 0 to 100
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
    assert shown["no floor"] == "diverged"
    assert shown["fixed floor"] == "not run"


def test_tables_have_the_papers_numbers():
    table = tables.accuracy(made(CPU, "utility_table"), "utility_table").set_index(["name", "data", "epsilon"])
    assert table.loc[("dp-ngd", "svhn", 1.0), "paper"] == 84.65
    assert tables.paper_accuracy("ablation_floor", "dp-ngd-fixed-floor", "utkface", 2.0) == 68.53
    assert tables.paper_accuracy("utility_table", "dp-ngd", "digits", 1.0) is None


@pytest.fixture(scope="module")
def valley():
    return motivation.valley(T=25)


def test_the_motivation_figure_is_computed(valley):
    """Same start and number of steps; DP-NGD ends nearer to the minimum, and lower."""
    sgd, ngd = valley.paths["dp-sgd"], valley.paths["dp-ngd"]
    assert np.allclose(sgd[0], ngd[0])
    assert len(sgd) == len(ngd) == 26
    away = {m: np.linalg.norm(p[-1] - valley.optimum) for m, p in valley.paths.items()}
    assert away["dp-ngd"] < 0.5 * away["dp-sgd"]
    assert valley.losses["dp-ngd"][-1] < 0.9 * valley.losses["dp-sgd"][-1]
    assert valley.sigma > 1
    figures.trajectories(valley).canvas.draw()


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


def test_labels_are_apart_and_below_the_top():
    assert plots.apart([1.0, 1.1, 5.0], 1.0, 10.0) == [1.0, 2.0, 5.0]
    assert plots.apart([7.9, 8.0, 8.1], 1.0, 8.5) == pytest.approx([6.5, 7.5, 8.5])
    assert plots.apart([3.0], 1.0, 8.0) == [3.0]
