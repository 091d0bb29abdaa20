"""Profiles: complete, consistent with the paper, strict about keys."""

import dataclasses
import math
from collections import Counter

import pytest

from dpngd.errors import UsageError
from dpngd.methods import METHODS
from dpngd.suite import paths, profiles
from dpngd.suite.params import interpolated, merge, nearest, number, pick, profile_names, published
from dpngd.suite.profiles import load

SHIPPED = ["cpu", "paper", "quick"]


def test_the_shipped_profiles():
    assert profile_names() == SHIPPED
    with pytest.raises(UsageError, match="unknown profile 'quik': did you mean 'quick'"):
        load("quik")
    with pytest.raises(UsageError, match="unknown profile 'published'"):
        load("published")


def test_paper_yaml_has_the_papers_values():
    paper, optimal = load("paper"), published()["optimal_configs"]
    stated = {entry["name"]: entry["value"] for entry in published()["setup"]["values"]}
    for data, steps in optimal["T"].items():
        for i, epsilon in enumerate(optimal["epsilons"]):
            config = paper.config("dp-ngd", data, epsilon, 0)
            assert (config.T, config.eta) == (steps[i], optimal["eta"][data][i])
            assert config.model.upper() == published()["utility_table"]["models"][data].upper()
            for name in ("B", "K", "delta", "public_size", "T_cur", "T1", "p"):
                assert getattr(config, name) == stated[name]
    assert stated["C of DP-NGD"] == paper.config("dp-ngd", "svhn", 1, 0).C
    assert stated["C of DP-SGD"] == paper.config("dp-sgd", "svhn", 1, 0).C
    assert stated["C of AdaDPS"] == paper.config("adadps", "svhn", 1, 0).C
    gep = paper.config("gep", "svhn", 1, 0)
    assert (stated["C of GEP's embedding"], stated["C of GEP's residual"]) == (gep.C0, gep.C1)
    table_2 = paper.configs("utility_table")
    assert len(table_2) == 7 * 3 * 5 * stated["seeds"], "the paper's five methods, and two of ours"
    assert sorted({c.epsilon for c in table_2}) == stated["epsilons"]
    axes = published()["robustness"]["axes"]
    assert paper.artifact("robustness")["vary"] == {name: axis["values"] for name, axis in axes.items()}
    for row in published()["overhead"]["rows"]:
        cell = {(c.data, c.epsilon, c.method, c.T) for c in paper.configs("overhead")}
        assert (row[0], row[1], row[2], row[4]) in cell
    assert math.floor(50000 / 4096) == 12  # steps per epoch: every T is a whole number of epochs
    for data, epoch in (("cifar10", 12), ("svhn", 17), ("utkface", 5)):
        assert paper.settings["data"][data]["N"] // 4096 == epoch
        assert all(T % epoch == 0 for T in optimal["T"][data])


def sgd_rate(profile, c, apart=None):
    """eta_sgd of a run's data set, epsilon and T, read from the files again, without `Profile`; `apart` is the name
    under which its search keeps its winners."""
    tables = profile.settings["tuned"].get("eta_sgd", {})
    own = apart or (c.model if c.model != profile.settings["data"][c.data]["model"] else None)
    table = tables.get(f"{c.data}/{own}") or tables.get(c.data)
    if not table:
        return profile.settings["methods"]["dp-sgd"]["eta"]
    by_T = table[min(table, key=lambda e: (abs(math.log(e / c.epsilon)), e))]
    below, above = max((T for T in by_T if T <= c.T), default=None), min((T for T in by_T if T >= c.T), default=None)
    if below is None or above is None or below == above:
        return by_T[above if below is None else below]
    share = (math.log(c.T) - math.log(below)) / (math.log(above) - math.log(below))
    return math.exp((1 - share) * math.log(by_T[below]) + share * math.log(by_T[above]))


def reach(c):
    """eta S lambda_safe^r, written out again for each kind of method."""
    if c.method == "gep":
        return c.eta * math.sqrt(c.C0**2 + c.C1**2)
    if c.method in ("dp-sgd", "dp-sgd-pt", "adadps", "dp-ngd-post", "dp-ngd-one-sided"):
        return c.eta * c.C
    if c.method == "dp-ngd-pre":
        return c.eta * c.C / c.lambda_safe
    return c.eta * c.C / math.sqrt(c.lambda_safe)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_run_keeps_the_equation_but_where_it_is_studied(name):
    """eta S lambda_safe^r = rate eta_sgd C_sgd: rate is 1 for DP-NGD, and what was tuned for baselines and arms; with
    fewer steps than were tuned it is 1 for all."""
    profile = load(name)
    seen = set()
    for artifact in profile.artifacts:
        equal, vary = artifact.endswith("_equal"), profile.artifact(artifact)["vary"]
        (search,) = [artifact] if artifact in profiles.SEARCHES else vary.get("search", [None])
        (choice,) = vary.get("choice", [None])
        apart = profile.settings[search].get("apart") if search else None
        for c in profile.configs(artifact):
            seen.add(c.method)
            if METHODS[c.method].kl_step or artifact == profiles.GATE or (artifact in profiles.SEARCHES
                                                                          and c.method != "dp-ngd"):
                continue  # no rate, or one that is being searched for
            eta_sgd, C_sgd = sgd_rate(profile, c, apart), profile.settings["methods"]["dp-sgd"]["C"]
            if METHODS[c.method].finds_rate:
                assert (c.eta_sgd, c.C_sgd) == (pytest.approx(eta_sgd, rel=1e-5), C_sgd)
                continue
            if c.method == "dp-ngd-no-floor":  # it has no floor to follow: its rate is DP-NGD's
                ngd = profile.config("dp-ngd", c.data, c.epsilon, c.seed)
                assert (c.eta, c.C, c.T) == (ngd.eta, ngd.C, ngd.T)
                continue
            chosen = profile.tuned(c.method, c.data, c.epsilon, apart or c.model, choice)
            fewer = "T" in chosen and chosen["T"] > c.T
            rate = 1.0 if equal or fewer or c.method == "dp-ngd" else chosen.get("rate", 1.0)
            kept = reach(c) == pytest.approx(rate * eta_sgd * C_sgd, rel=1e-5)
            if artifact == profiles.BREAKS:
                base = profile.config("dp-ngd", c.data, c.epsilon, c.seed)
                assert kept == (c.lambda_safe != base.lambda_safe or c.eta == base.eta), c.label()
            else:
                assert kept, c.label()
    assert seen == set(METHODS)


def test_breaking_the_bound_stands_beside_keeping_it_at_the_same_rates():
    for name in SHIPPED:
        profile = load(name)
        first = (profile.artifact("bound")["seeds"] or profile.seeds)[0]
        runs = [c for c in profile.configs("bound") if c.seed == first]
        base = runs[0]
        broken = sorted(c.eta / base.eta for c in runs if c.lambda_safe == base.lambda_safe)
        kept = {round(c.eta / base.eta, 4): c.lambda_safe / base.lambda_safe for c in runs
                if c.lambda_safe != base.lambda_safe}
        assert broken == pytest.approx(sorted([1.0, *kept]), rel=1e-4)
        assert all(floor == pytest.approx(factor**2, rel=1e-4) for factor, floor in kept.items())
        assert all(c.lambda_base / c.lambda_safe == pytest.approx(base.lambda_base / base.lambda_safe, rel=1e-4)
                   for c in runs)


def test_at_the_floor_all_clipping_spaces_clip_the_same_gradients():
    profile = load("paper")
    ngd, pre, post = (profile.config(m, "cifar10", 2, 0) for m in ("dp-ngd", "dp-ngd-pre", "dp-ngd-post"))
    raw = ngd.C * math.sqrt(ngd.lambda_safe)
    assert pytest.approx(raw) == pre.C
    assert post.C * post.lambda_safe == pytest.approx(raw)
    assert pre.eta == post.eta == ngd.eta, "three ways of clipping one and the same natural step"


@pytest.mark.parametrize("name", SHIPPED)
def test_artifacts_share_their_runs(name):
    profile = load(name)
    looks = {"evals": 1}  # how often a run is looked at is a matter of drawing
    keys = {a: {dataclasses.replace(c, **looks).key() for c in profile.configs(a)} for a in profile.artifacts}
    assert all(keys.values())
    assert keys["overhead"] <= keys["convergence"]
    assert keys["robustness"] & keys["ablation_floor"], "the default of Table 6 is the dynamic floor of Figure 4"
    assert keys["sample_efficiency"] & keys["robustness"], "500 public images are the default"
    assert keys["ablation_clipping"] & keys["ablation_ours"] & keys["ablation_decoupling"]
    assert keys["ablation_floor"] & keys["utility_table"]
    assert keys["whole"] <= keys["utility_table"] or name == "cpu", "the others have the whole set anyway"
    assert not keys["tuning"] & set().union(*(k for a, k in keys.items() if a not in profiles.FIXED))
    assert len(profile.all_configs()) == len({c.key() for a in profile.artifacts for c in profile.configs(a)})


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("method", [m for m in METHODS if METHODS[m].kl_step])
def test_a_method_without_a_rate_is_built_from_its_settings_alone(name, method):
    profile = load(name)
    for data, row in profile.settings["artifacts"]["utility_table"]["cells"].items():
        c = profile.config(method, data, row[0], 0)
        assert (c.eta, c.lambda_safe, c.C) == (None, None, None)
        assert (c.public == "noise") == (method == "dp-ngd-free")
        assert profile.config(method, data, row[0], 0, kl_budget=3.0).kl_budget == 3.0


@pytest.mark.parametrize("name", SHIPPED)
def test_tuning_is_fair_and_apart(name):
    profile = load(name)
    section = profile.settings["tuning"]
    cells = [(d, e) for d, row in section["cells"].items() for e in row]
    trials = {}
    for method in section["grid"]:
        for data, epsilon in cells:
            first = profile.trials(method, data, epsilon)
            curve = section["curve"].get(data, {}).get(epsilon, []) if method == "dp-sgd" else []
            trials[method, data, epsilon] = len([c for _, c in first if c.T not in curve])
    arms = {n for (m, *_), n in trials.items() if METHODS[m].arm_of and n}
    methods = {n for (m, *_), n in trials.items() if not METHODS[m].arm_of}
    assert len(arms) == len(methods) == 1, f"unequal numbers of trials: {trials}"
    assert {m for m, *_ in trials if not METHODS[m].arm_of} == {"dp-sgd", "dp-sgd-pt", "gep", "adadps", "dp-ngd"}
    every = profile.configs("tuning")
    assert all(c.validation > 0 for c in every)
    results = [c for a in profile.artifacts if a not in profiles.FIXED for c in profile.configs(a)]
    assert not {c.seed for c in every} & {c.seed for c in results}
    other = profile.configs("tuning_networks") if "tuning_networks" in profile.artifacts else []
    first = Counter(c.method for c in other if c.seed == section["seeds"][0])
    assert len(set(first.values())) <= 1
    assert set(first) in (set(), {c.method for c in profile.configs("networks") if METHODS[c.method].rate})
    assert all(c.validation > 0 and c.seed not in profile.seeds for c in other)
    assert all(c.validation == 0 for c in results)
    assert {c.data for c in results} == {c.data for c in every}


def test_the_search_of_cpu_is_the_protocols():
    cpu = load("cpu")
    for data in ("cifar10", "svhn", "utkface"):
        for epsilon in (1, 8):
            for method in ("dp-sgd", "dp-sgd-pt", "gep", "adadps", "dp-ngd"):
                trials = [c for _, c in cpu.trials(method, data, epsilon) if c.T in (100, 200, 400)]
                assert len(trials) == len({c.key() for c in trials}) == 18
                assert Counter(c.T for c in trials) == {100: 6, 200: 6, 400: 6}
                assert {(c.seed, c.validation, c.evals) for c in trials} == {(1000, 0.1, 1)}
            trials = cpu.trials("dp-ngd", data, epsilon)
            floors = {(c.lambda_safe, round(c.lambda_base / c.lambda_safe, 4)) for _, c in trials}
            assert floors == {(0.25, 0.25), (1, 0.25), (4, 0.25), (16, 0.25), (1, 0.0625), (4, 0.0625)}
    extra = {(c.data, c.epsilon, c.T) for d in cpu.settings["data"] if d != "digits" for e in (1, 8)
             for _, c in cpu.trials("dp-sgd", d, e)} - {(d, e, T) for d in ("cifar10", "svhn", "utkface")
                                                        for e in (1, 8) for T in (100, 200, 400)}
    assert extra == {("cifar10", 1, 25), ("cifar10", 1, 800), ("svhn", 8, 25), ("svhn", 8, 800)}, "for Figure 2"
    # 6 and 3 x 2 for four methods; 6 and 3 x 2 x 2 for DP-SGD; 2 + 4 at each T of Figure 2; 3 x 2 for an arm; networks
    assert cpu.later_trials() == 6 * (4 * 12 + 18) + 4 * 6 + 12 * 6 + 8 or cpu.settings["trials"]


def test_the_gate_of_cpu_is_the_protocols():
    cpu = profiles.untuned("cpu")
    cpu.settings["gated"] = {}
    assert cpu.gate_path("cifar10") == [(N, B) for N in (25000, 12500, 6250) for B in (256, 512, 1024)]
    assert cpu.gate_path("utkface") == [(N, B) for N in (10500, 6250) for B in (256, 512, 1024)]
    runs = cpu.gate_runs("svhn", 12000, 256)
    assert len(runs) == 2 * 3
    assert {(c.method, c.T, c.N, c.B, c.validation) for c in runs} == {("dp-sgd", 400, 12000, 256, 0.1)}
    assert ({c.epsilon for c in runs}, {c.seed for c in runs}) == ({1, 8}, {1000})
    assert cpu.settings["gate"]["points"] == {"cifar10": 10, "svhn": 5, "utkface": 8}
    assert len(cpu.configs("gate")) == (9 + 9 + 6) * 6


def test_quick_is_quick():
    quick = load("quick")
    runs = quick.all_configs()
    assert len(runs) <= 175
    assert {c.data for c in runs} == {"digits"}
    assert {c.public for c in runs} <= {None, "photos", "noise", "dead-leaves"}, "nothing to download"
    assert all((c.B, c.N, c.model, c.K) == (256, 1437, "small", 1) for c in runs)
    assert sum(map(quick.seconds, runs)) / 2 < 120, "the notebooks take a minute more"


def test_cpu_covers_the_papers_cells():
    cpu, paper = load("cpu"), load("paper")

    def cells(profile, artifact):
        return {(c.method, c.data, c.epsilon) for c in profile.configs(artifact)}

    for artifact in ("utility_table", "ablation_decoupling", "ablation_clipping", "ablation_floor", "robustness"):
        assert cells(cpu, artifact) == cells(paper, artifact)
    assert all(c.model == "small" for c in cpu.configs("utility_table"))
    seeds = {a: len({c.seed for c in cpu.configs(a)}) for a in cpu.artifacts if a not in profiles.FIXED}
    assert seeds == {
        "utility_table": 8, "ablation_decoupling": 8, "ablation_decoupling_equal": 8, "ablation_clipping": 8,
        "ablation_clipping_equal": 8, "convergence": 6, "overhead": 6, "sample_efficiency": 8, "ablation_floor": 10,
        "ablation_floor_equal": 10, "robustness": 10, "sources": 8, "bound": 6, "ablation_ours": 8, "kl_maps": 3,
        "whole": 8, "views": 4, "releases": 4, "pretraining": 4, "networks": 3, "between": 8,
        "mean_choice": 8}
    assert {c.test_share for c in cpu.configs("utility_table", datasets=["utkface"])} == {0.5}
    assert sorted({c.public_size for c in cpu.configs("sample_efficiency")}) == [50, 150, 500, 1500, 5000]
    assert {(c.model, c.K) for c in cpu.configs("networks")} == {("small", 1), ("wrn-10-1", 1)}
    assert {(c.N, c.epsilon) for c in cpu.configs("whole")} == {(50000, 1), (50000, 8)}
    for data in ("cifar10", "svhn"):
        assert {c.T for c in cpu.configs("convergence", datasets=[data])} == {25, 50, 100, 200, 400, 800}


def test_what_is_given_replaces_the_profiles_choice():
    quick = load("quick")
    runs = quick.configs("utility_table", methods=["dp-ngd", "dp-sgd"], epsilons=[3], seeds=[7, 8])
    assert [(c.method, c.epsilon, c.seed) for c in runs] == [
        ("dp-ngd", 3, 7), ("dp-ngd", 3, 8), ("dp-sgd", 3, 7), ("dp-sgd", 3, 8)
    ]  # fmt: skip
    paper = load("paper")
    other = paper.configs("sample_efficiency", datasets=["svhn"], methods=["gep"], seeds=[0])
    assert {(c.data, c.epsilon) for c in other} == {("svhn", 2)}
    with pytest.raises(UsageError, match="seeds: seed 7 is given twice; a run counts once"):
        quick.configs("utility_table", seeds=[7, 8, 7])
    assert {c.public_size for c in other} == {50, 100, 200, 500, 1000, 2000, 5000}
    one = paper.configs("sources", methods=["dp-sgd"], seeds=[0])
    assert len(one) == 1, "a method without a public set runs once"


def test_an_unlisted_epsilon_takes_the_nearest_listed_settings():
    paper = load("paper")
    assert paper.config("dp-ngd", "cifar10", 3.0, 0).T == 1920
    assert paper.config("dp-ngd", "cifar10", 2.5, 0).T == 1320
    assert paper.config("dp-ngd", "cifar10", 100.0, 0).T == 2640
    assert paper.config("dp-ngd", "cifar10", 0.1, 0).epsilon == 0.1


def test_single_changes():
    quick = load("quick")
    base = quick.config("dp-ngd", "digits", 4, 0)
    twice = quick.config("dp-ngd", "digits", 4, 0, rate=2.0)
    assert (twice.eta, twice.lambda_safe) == (pytest.approx(2 * base.eta, rel=1e-5), base.lambda_safe)
    scaled = quick.config("dp-ngd", "digits", 4, 0, scale=2.0)
    assert (scaled.eta, scaled.lambda_safe) == (twice.eta, pytest.approx(4 * base.lambda_safe, rel=1e-5))
    assert scaled.lambda_base == pytest.approx(4 * base.lambda_base, rel=1e-5)
    lower = quick.config("dp-ngd", "digits", 4, 0, lambda_safe=base.lambda_safe / 9)
    assert lower.eta == pytest.approx(base.eta / 3, rel=1e-5), "the rate follows the floor"
    assert lower.lambda_base == pytest.approx(base.lambda_base / 9, rel=1e-5)
    assert quick.config("dp-ngd", "digits", 4, 0, eta=0.5).lambda_safe == base.lambda_safe
    assert quick.config("dp-ngd", "digits", 4, 0, T=5).evals == 5
    assert load("paper").config("dp-ngd", "svhn", 1, 0, lambda_safe=0.01).eta == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: p.configs("table2"), "unknown artifact 'table2'"),
        (lambda p: p.configs("utility_table", methods=["dp-ngdd"]), "unknown method 'dp-ngdd': did you mean 'dp-ngd'"),
        (lambda p: p.configs("utility_table", datasets=["svnh"]), "unknown data set 'svnh': did you mean 'svhn'"),
        (lambda p: p.configs("utility_table", methods="dp-ngd"), "methods = 'dp-ngd': give a list"),
        (lambda p: p.configs("utility_table", seeds=[]), r"seeds = \[\]: give a list"),
        (lambda p: p.configs("utility_table", epsilons=[0]), "epsilon = 0: must be in"),
        (lambda p: p.configs("utility_table", seeds=[0.5]), "seed = 0.5: must be int"),
        (lambda p: p.configs("tuning", methods=["dp-ngd-no-floor"]), "in the tuning grid 'dp-ngd-no-floor'"),
        (lambda p: p.config("dp-sgd", "digits", 1, 0), "T of dp-sgd is not stated for digits, only for cifar10"),
        (lambda p: p.config("dp-sgd", "svhn", 1, 0, lambda_safe=1.0), "dp-sgd does not use it"),
        (lambda p: p.config("dp-sgd", "svhn", 1, 0, etta=1.0), "unknown field 'etta': did you mean 'eta'"),
    ],
)
def test_bad_requests(call, message):
    with pytest.raises(UsageError, match=message):
        call(load("paper"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "paper.yaml").write_text((paths.PARAMS / "paper.yaml").read_text())
    monkeypatch.setattr(paths, "PARAMS", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sedes: [1]", r"^mine.yaml: unknown key 'sedes': did you mean 'seeds'"),
        ("defaults: {batch: 3}", r"^mine.yaml: unknown key 'defaults.batch'"),
        (
            "methods: {dp-ngd: {lambda_saf: 1}}",
            "'methods.dp-ngd.lambda_saf': did you mean 'methods.dp-ngd.lambda_safe'",
        ),
        ("methods: {dp-sdg: {eta: 1}}", "'methods.dp-sdg': did you mean 'methods.dp-sgd'"),
        ("artifacts: {table: {}}", "unknown key 'artifacts.table'"),
        ("data: {mnist: {N: 3}}", "unknown key 'data.mnist'"),
        ("defaults: 3", "defaults must be a section, not 3"),
        ("methods: {dp-ngd: null}", "methods.dp-ngd must be a section, not None"),
        ("seeds: [0]\nseeds: [1]", r"^mine.yaml line 2: 'seeds' is given twice"),
        ("seeds: [0", r"^mine.yaml line 1: expected"),
        ("3", "must hold keys and values"),
        ("seeds: [1000]", "seed 1000 is used for tuning and for results"),
        ("artifacts: {bound: {seeds: [0, 1001]}}", "seed 1001 is used for tuning and for bound"),
        ("seeds: [0, 1, 0]", "^mine: seeds: seed 0 is given twice"),
        ("artifacts: {views: {seeds: [0, 1, 1]}}", r"^mine: views.seeds: seed 1 is given twice"),
        ("tuning: {grid: {dp-ngd: {rate: [1, 2]}}}", r"^mine: tuning.grid.dp-ngd.rate: breaks the equation of section"),
        ("tuning: {grid: {dp-ngd: {eta: [1, 2]}}}", "dp-ngd.eta: breaks the equation .* give lambda_safe"),
        ("artifacts: {views: {vary: {rate: [1.0, 2.0]}}}", "^mine: views.vary.rate: breaks the equation"),
        ("artifacts: {views: {vary: {evals+rate: [[2, 2.0]]}}}", r"^mine: views.vary.evals\+rate: breaks the equation"),
        ("gate: {cells: {svhn: [1, 8]}}", "^mine: gate.N is not stated for svhn"),
        ("artifacts: {sources: {cells: [utkface]}}", r"sources.cells = \['utkface'\] has the wrong form"),
        ("artifacts: {robustness: {vary: {T_curr: [1]}}}", "robustness: unknown field 'T_curr': did you mean 'T_cur'"),
        ("artifacts: {sources: {methods: [gepp]}}", "sources: unknown method 'gepp': did you mean 'gep'"),
        ("artifacts: {sources: {cells: {utk: [1]}}}", "sources: unknown data set 'utk'"),
        ("tuning: {grid: {dp-sgdd: {rate: [1]}}}", "tuning: unknown method 'dp-sgdd': did you mean 'dp-sgd'"),
        ("tuning: {grid: {gep: {C0+C3: [[1, 2]]}}}", "tuning: unknown field 'C3'"),
        ("seeds: 3", "seeds = 3 must be a list"),
        ("methods: {dp-ngd: {lambda_safe: 1.0}}", "dp-ngd must state eta or lambda_safe, the other"),
        ("methods: {dp-ngd: {eta: null}}", "dp-ngd must state eta or lambda_safe, the other"),
        ("defaults: {delta: 1e-5}", "delta = '1e-5': must be float, not str"),
    ],
)
def test_a_profile_with_a_mistake_is_refused(folder, text, message):
    (folder / "mine.yaml").write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        load("mine").configs("utility_table")
    assert "\n" not in str(caught.value)


def test_a_profile_of_ones_own(folder):
    (folder / "mine.yaml").write_text(
        "seeds: [4]\nmethods: {dp-ngd: {eta_sgd: 4.0}, dp-ngd-pre: {C: 3.0, eta_sgd: {svhn: 1.0}}}\n"
    )
    mine, paper = load("mine"), load("paper")
    assert {c.seed for c in mine.configs("utility_table")} == {4}
    ngd = mine.config("dp-ngd", "svhn", 1, 0)
    assert (ngd.eta, ngd.lambda_safe) == (0.01, 0.000625), "a larger DP-SGD step allows a lower floor"
    pre = mine.config("dp-ngd-pre", "svhn", 1, 0)
    assert (pre.C, pre.eta) == (3.0, pytest.approx(1.0 * 0.000625 / 3.0, rel=1e-5))
    assert mine.config("gep", "svhn", 1, 0) == paper.config("gep", "svhn", 1, 0)


def test_an_axis_can_change_fields_together(folder):
    (folder / "mine.yaml").write_text(
        "artifacts: {networks: {methods: [dp-sgd, dp-ngd], vary: {model+lambda_safe+scale: [[small, 0.04, 2], "
        "[resnet-20, 0.01, 1]]}}}\n"
        "tuning: {grid: {gep: {C0+C1: [[1.0]]}}}\n"
    )
    mine = load("mine")
    runs = mine.configs("networks", seeds=[0])
    assert [(c.method, c.model, c.lambda_safe, c.eta) for c in runs] == [
        ("dp-sgd", "small", None, 2.0),
        ("dp-sgd", "resnet-20", None, 2.0),
        ("dp-ngd", "small", 0.16, 0.08),
        ("dp-ngd", "resnet-20", 0.01, 0.02),
    ]
    with pytest.raises(UsageError, match=r"C0\+C1: \[1.0\] must be a list of 2 values"):
        mine.configs("tuning")


def test_merge_replaces_settings_whole_and_leaves_its_inputs():
    base = {"methods": {"a": {"T": {"x": 1, "y": 2}, "C": 1}}, "seeds": [1]}
    merged = merge(base, {"methods": {"a": {"T": {"x": 3}}}}, "f")
    assert merged == {"methods": {"a": {"T": {"x": 3}, "C": 1}}, "seeds": [1]}
    assert base["methods"]["a"]["T"] == {"x": 1, "y": 2}


def test_looking_up_a_cell():
    assert pick(3, "d", 1.0, "T", "m") == 3
    assert pick({"d": 4}, "d", 1.0, "T", "m") == 4
    assert pick({"d": {1: 5, 4: 6}}, "d", 2.0, "T", "m") == 5, "a tie takes the smaller epsilon"
    assert pick({"d": {1: 5, 4: 6}}, "d", 2.1, "T", "m") == 6
    with pytest.raises(UsageError, match="T of m is not stated for e, only for d"):
        pick({"d": 4}, "e", 1.0, "T", "m")
    assert number(1 / 3) == 0.333333
    assert nearest({1: "a", 8: "b"}, 2.0) == "a"
    assert nearest({1: "a", 8: "b"}, 4.0) == "b"
    assert [interpolated({100: 4.0, 400: 1.0}, T) for T in (25, 100, 200, 400, 800)] == pytest.approx(
        [4.0, 4.0, 2.0, 1.0, 1.0]), "log-log within, and the last row beyond: no slope is made up"


def test_profiles_offer_what_they_say():
    quick = load("quick")
    assert quick.about
    assert set(profiles.__all__) <= set(vars(profiles))
    assert quick.seconds(quick.config("dp-ngd", "digits", 4, 0)) > quick.seconds(quick.config("dp-sgd", "digits", 4, 0))
