"""Profiles: complete, consistent with the paper, strict about keys."""

import dataclasses
import math
from collections import Counter

import pytest

from dpngd.errors import UsageError
from dpngd.methods import METHODS
from dpngd.suite import paths, profiles
from dpngd.suite.params import merge, number, pick, profile_names, published
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
    assert len(table_2) == 5 * 3 * 5 * stated["seeds"]
    assert sorted({c.epsilon for c in table_2}) == stated["epsilons"]
    axes = published()["robustness"]["axes"]
    assert paper.artifact("robustness")["vary"] == {name: axis["values"] for name, axis in axes.items()}
    for row in published()["overhead"]["rows"]:
        cell = {(c.data, c.epsilon, c.method, c.T) for c in paper.configs("overhead")}
        assert (row[0], row[1], row[2], row[4]) in cell
    assert math.floor(50000 / 4096) == 12  # steps an epoch: every T is a whole number of epochs
    for data, epoch in (("cifar10", 12), ("svhn", 17), ("utkface", 5)):
        assert paper.settings["data"][data]["N"] // 4096 == epoch
        assert all(T % epoch == 0 for T in optimal["T"][data])


@pytest.mark.parametrize("name", SHIPPED)
def test_every_run_follows_the_step_rule(name):
    """eta S lambda_safe^-r = rate eta_sgd C_sgd, written out again for each kind of method; rate was tuned."""
    profile = load(name)
    tuned = [a for a in profile.artifacts if a not in profiles.SEARCHES
             and not any("rate" in axis.split("+") for axis in profile.artifact(a)["vary"])]
    for c in (c for artifact in tuned for c in profile.configs(artifact)):
        stated = (profile.setting(n, "dp-sgd", c.data, c.epsilon) for n in ("eta", "C"))
        step = math.prod(stated) * profile.tuned(c.method, c.data, c.model)["rate"]
        if c.method == "gep":
            reach = c.eta * math.sqrt(c.C0**2 + c.C1**2)
        elif c.method in ("dp-sgd", "dp-sgd-pt", "adadps", "dp-ngd-post", "dp-ngd-one-sided"):
            reach = c.eta * c.C
        elif c.method == "dp-ngd-pre":
            reach = c.eta * c.C / c.lambda_safe
        elif c.method == "dp-ngd-no-floor":  # it has no floor to follow: its rate is DP-NGD's
            ngd = profile.config("dp-ngd", c.data, c.epsilon, c.seed)
            assert (c.eta, c.C) == (ngd.eta, ngd.C)
            continue
        else:
            reach = c.eta * c.C / math.sqrt(c.lambda_safe)
            if c.lambda_base is not None:
                assert c.lambda_base == pytest.approx(c.lambda_safe / 4, rel=1e-5)
        assert reach == pytest.approx(step, rel=1e-5), c.label()


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
    assert not keys["tuning"] & set().union(*(k for a, k in keys.items() if a not in profiles.SEARCHES))
    assert len(profile.all_configs()) == len({c.key() for a in profile.artifacts for c in profile.configs(a)})
    assert {c.method for c in profile.all_configs()} == {m for m in METHODS if METHODS[m].rate}


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("method", [m for m in METHODS if not METHODS[m].rate])
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
    every, section = profile.configs("tuning"), profile.settings["tuning"]
    repeats = Counter((c.method, c.data) for c in every if c.seed not in section["seeds"])
    assert set(repeats.values()) <= {section["repeat"]["best"] * len(section["repeat"]["seeds"])}
    runs = [c for c in every if c.seed in section["seeds"]]
    arms = Counter(c.method for c in runs if METHODS[c.method].arm_of)
    assert len(set(arms.values())) <= 1, f"unequal numbers of trials: {arms}"
    trials = Counter((c.method, c.data) for c in runs if not METHODS[c.method].arm_of)
    assert len(set(trials.values())) == 1, f"unequal numbers of trials: {trials}"
    assert {m for m, _ in trials} == {"dp-sgd", "dp-sgd-pt", "gep", "adadps", "dp-ngd"}
    assert all(c.validation > 0 for c in every)
    assert not {c.seed for c in every} & set(profile.seeds)
    other = profile.configs("tuning_networks") if "tuning_networks" in profile.artifacts else []
    assert len({n for n in Counter(c.method for c in other if c.seed == section["seeds"][0]).values()}) <= 1
    assert {c.method for c in other} in (set(), {c.method for c in profile.configs("networks")})
    assert all(c.validation > 0 and c.seed not in profile.seeds for c in other)
    results = [c for a in profile.artifacts if a not in profiles.SEARCHES for c in profile.configs(a)]
    assert all(c.validation == 0 for c in results)
    assert {c.data for c in results} == {c.data for c in runs}


def test_quick_is_quick():
    quick = load("quick")
    runs = quick.all_configs()
    assert len(runs) <= 155
    assert {c.data for c in runs} == {"digits"}
    assert {c.public for c in runs} <= {None, "photos", "noise", "dead-leaves"}, "nothing to download"
    assert all((c.B, c.N, c.model, c.K) == (256, 1437, "small", 1) for c in runs)
    assert sum(map(quick.seconds, runs)) / 2 < 240


def test_cpu_covers_the_papers_cells():
    cpu, paper = load("cpu"), load("paper")

    def cells(profile, artifact):
        return {(c.method, c.data, c.epsilon) for c in profile.configs(artifact)}

    for artifact in ("utility_table", "ablation_decoupling", "ablation_clipping", "ablation_floor", "robustness"):
        assert cells(cpu, artifact) == cells(paper, artifact)
    assert all(c.model == "small" and 0.02 < c.B / c.N < 0.025 for c in cpu.configs("utility_table"))
    sizes = {c.public_size for c in cpu.configs("sample_efficiency")}
    assert (min(sizes), max(sizes)) == (50, 5000)
    assert len(cpu.seeds) >= 3
    assert {(c.model, c.K) for c in cpu.configs("networks")} == {("small", 1), ("wrn-10-1", 1), ("small", 4)}
    assert {c.N for c in cpu.configs("utility_table")} == {50000, 24000, 20800}
    for data in ("cifar10", "svhn"):
        assert len({c.T for c in cpu.configs("convergence", datasets=[data])}) >= 6


def test_what_is_given_replaces_the_profiles_choice():
    quick = load("quick")
    runs = quick.configs("utility_table", methods=["dp-ngd", "dp-sgd"], epsilons=[3], seeds=[7, 8])
    assert [(c.method, c.epsilon, c.seed) for c in runs] == [
        ("dp-ngd", 3, 7), ("dp-ngd", 3, 8), ("dp-sgd", 3, 7), ("dp-sgd", 3, 8)
    ]  # fmt: skip
    paper = load("paper")
    other = paper.configs("sample_efficiency", datasets=["svhn"], methods=["gep"], seeds=[0])
    assert {(c.data, c.epsilon) for c in other} == {("svhn", 2)}
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
    assert quick.config("dp-ngd", "digits", 4, 0, rate=2.0).eta == pytest.approx(2 * base.eta, rel=1e-5)
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
        "artifacts: {networks: {vary: {model+lambda_safe+rate: [[small, 0.04, 2], [resnet-20, 0.01, 1]]}}}\n"
        "tuning: {grid: {gep: {C0+C1: [[1.0]]}}}\n"
    )
    mine = load("mine")
    runs = mine.configs("networks", seeds=[0])
    assert [(c.method, c.model, c.lambda_safe, c.eta) for c in runs] == [
        ("dp-sgd", "small", None, 4.0),
        ("dp-sgd", "resnet-20", None, 2.0),
        ("dp-ngd", "small", 0.04, 0.08),
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


def test_profiles_offer_what_they_say():
    quick = load("quick")
    assert quick.about
    assert set(profiles.__all__) <= set(vars(profiles))
    assert quick.seconds(quick.config("dp-ngd", "digits", 4, 0)) > quick.seconds(quick.config("dp-sgd", "digits", 4, 0))
