"""RunConfig: what it accepts, what it refuses and with which words, and what its key depends on."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpngd.errors import UsageError
from dpngd.methods import METHODS
from dpngd.training import config
from dpngd.training.config import FIELDS, METHOD_FIELDS, RunConfig

RESULTS = sorted((Path(__file__).parents[2] / "results").glob("*.jsonl"))
COMMON = {
    "data": "digits",
    "model": "small",
    "epsilon": 2.0,
    "B": 256,
    "T": 40,
    "eta": 1.0,
    "seed": 0,
    "N": 1437,
}
SPECIFIC = {
    "public": "photos", "public_size": 500, "C": 1.0, "lambda_safe": 0.3, "lambda_base": 0.075,
    "T1": 0.1, "p": 10.0, "T_cur": 8, "adadps_e": 1e-6, "C0": 10.0, "C1": 2.0,
    "gep_directions": 100, "pt_steps": 50, "pt_eta": 0.1, "curvature_C": 1.0, "kl_budget": 10.0,
    "kl_noise": 3.0, "probe": 128, "floor_rank": 0.003, "clip_ratio": 0.1, "eta_sgd": 2.0, "C_sgd": 1.0,
}  # fmt: skip


def values(of="dp-ngd", **changes):
    entry = METHODS[of]
    made = {"public": entry.public_from[0]} if entry.public_from else {}
    found = {"method": of, **COMMON, **{k: SPECIFIC[k] for k in entry.uses}, **made}
    if not entry.rate:
        del found["eta"]
    return {**found, **changes}


def make(of="dp-ngd", **changes):
    return RunConfig.from_dict(values(of, **changes))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_config_and_it_comes_back_from_json(method):
    config_ = make(method)
    again = RunConfig.from_dict(json.loads(json.dumps(config_.canonical())))
    assert again == config_
    assert again.key() == config_.key()
    assert len(config_.key()) == 16
    assert None not in config_.canonical().values()


def test_the_method_fields_are_the_ones_this_test_knows():
    assert set(METHOD_FIELDS) == set(SPECIFIC)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", SPECIFIC)
def test_a_method_needs_its_fields_and_refuses_the_others(method, name):
    if name in METHODS[method].uses:
        with pytest.raises(UsageError, match=rf"^{method} needs {name} \("):
            make(method, **{name: None})
    else:
        with pytest.raises(UsageError, match=f"^{name} = .*: {method} does not use it"):
            make(method, **{name: SPECIFIC[name]})


def test_which_methods_read_a_public_set():
    private = {name for name, spec in METHODS.items() if not spec.public}
    assert private == {"dp-sgd", "dp-ngd-private-20", "dp-ngd-private-50"}
    own = {"dp-ngd-auto", "dp-ngd-kl", "dp-ngd-free"}  # methods beyond the paper, not arms of its ablations
    assert all((spec.arm_of is None) == (name in own) for name, spec in METHODS.items() if name.startswith("dp-ngd-"))


def test_which_methods_have_no_rate():
    arms = {"dp-ngd-kl-one-sided", "dp-ngd-kl-post", "adadps-kl"}  # the KL step with other maps
    kl = {name for name, spec in METHODS.items() if spec.kl_step}
    assert kl == {"dp-ngd-kl", "dp-ngd-free", "dp-sgd-kl"} | arms
    assert {name for name in kl if METHODS[name].arm_of} == arms
    assert {name for name, spec in METHODS.items() if not spec.rate} == kl | {"dp-ngd-auto"}
    assert make("dp-ngd-free").eta is None
    assert "eta" not in make("dp-ngd-free").canonical()


def test_every_field_is_documented_and_frozen():
    assert all(len(f.metadata["doc"]) > 5 for f in FIELDS.values())
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().eta = 2.0


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("dp-sgd", {"method": "dpsgd"}, "unknown method 'dpsgd': did you mean 'dp-sgd'"),
        ("dp-sgd", {"data": "cifar-10"}, "unknown private data set 'cifar-10': did you mean 'cifar10'"),
        ("dp-sgd", {"model": "smal"}, "unknown model 'smal': did you mean 'small'"),
        ("dp-sgd", {"model": "wrn-17-4"}, r"depth 17 is not 6n \+ 4 with n >= 1, take 16"),
        ("dp-sgd", {"model": "resnet-21"}, r"depth 21 is not 6n \+ 2 with n >= 1, take 20"),
        ("dp-sgd", {"model": "resnet-2"}, r"depth 2 is not 6n \+ 2 with n >= 1, take 8"),
        ("dp-ngd", {"public": "cifar100+imagnet"}, "unknown public data set 'imagnet': did you mean 'imagenet'"),
        ("dp-ngd", {"public": "photos+photos"}, "names a set twice"),
        ("dp-sgd", {"learning_rate": 1.0}, "unknown field 'learning_rate'"),
        ("dp-sgd", {"Eta": 1.0}, "unknown field 'Eta': did you mean 'eta'"),
        ("dp-sgd", {"T": 40.0}, "T = 40.0: must be int, not float"),
        ("dp-sgd", {"T": True}, "T = True: must be int, not bool"),
        ("dp-sgd", {"eta": True}, "eta = True: must be float, not bool"),
        ("dp-sgd", {"eta": "1"}, "eta = '1': must be float, not str"),
        ("dp-sgd", {"eta": None}, "eta = None: must be float, not NoneType"),
        ("dp-sgd", {"augment": 1}, "augment = 1: must be bool, not int"),
        ("dp-sgd", {"method": 3}, "method = 3: must be str"),
        ("dp-sgd", {"epsilon": 0}, r"epsilon = 0.0: must be in \(0, inf\)"),
        ("dp-sgd", {"epsilon": -1.0}, "epsilon = -1.0"),
        ("dp-sgd", {"epsilon": float("inf")}, "epsilon = inf: must be in"),
        ("dp-sgd", {"eta": float("nan")}, "eta = nan: must be in"),
        ("dp-sgd", {"eta": 10**400}, "eta = inf: must be in"),
        ("dp-sgd", {"N": 2**64}, "N = .* must be below 2"),
        ("dp-sgd", {"delta": 0.0}, "delta = 0.0: must be in"),
        ("dp-sgd", {"delta": 1e-3}, "delta = 0.001 must be below 1/N"),
        ("dp-sgd", {"B": 1438}, "B = 1438 is more than the 1437 private"),
        ("dp-sgd", {"B": 1200, "validation": 0.2}, "B = 1200 is more than the 1150 private"),
        ("dp-sgd", {"B": 0}, r"B = 0: must be in \[1, inf\)"),
        ("dp-sgd", {"T": 0}, "T = 0: must be in"),
        ("dp-sgd", {"seed": -1}, "seed = -1: must be in"),
        ("dp-sgd", {"validation": 1.0}, "validation = 1.0: must be in"),
        ("dp-sgd", {"ema": 1.0}, "ema = 1.0: must be in"),
        ("dp-sgd", {"evals": 41}, "evals = 41 is more than the T = 40"),
        ("dp-sgd", {"K": 4}, "K = 4 without augment"),
        ("dp-ngd", {"p": 1.0}, r"p = 1.0: must be in \(1, inf\)"),
        ("dp-ngd", {"T1": 1.0}, r"T1 = 1.0: must be in \(0, 1\)"),
        ("dp-ngd", {"lambda_base": 0.4}, "lambda_base = 0.4 is above lambda_safe = 0.3"),
        ("dp-ngd", {"public_size": 49}, r"public_size = 49: must be in \[50, 5000\]"),
        ("dp-ngd", {"public_size": 5001}, "public_size = 5001"),
        ("dp-ngd-kl", {"eta": 1.0}, "eta = 1.0 beside kl_budget: dp-ngd-kl has no rate"),
        ("dp-ngd-auto", {"eta": 1.0}, "eta = 1.0 beside eta_sgd: dp-ngd-auto finds its floor when it starts"),
        ("dp-ngd-auto", {"eta_sgd": 0.0}, r"eta_sgd = 0.0: must be in \(0, inf\)"),
        ("dp-sgd", {"test_share": 1.0}, r"test_share = 1.0: must be in \(0, 1\)"),
        ("dp-sgd", {"data": "svhn", "N": 6000, "test_share": 0.5}, r"test_share = 0.5: only for sets that have no "
         r"official split \(utkface, utkface-gender, utkface-age, digits\), not for svhn"),
        ("dp-ngd-kl", {"kl_radius": 0.1}, "kl_radius = 0.1 beside kl_budget: dp-ngd-kl has no rate"),
        ("dp-ngd", {"kl_budget": 10.0}, "kl_budget = 10.0: dp-ngd does not use it"),
        ("dp-ngd-kl", {"kl_budget": 0.0}, r"kl_budget = 0.0: must be in \(0, inf\)"),
        ("dp-ngd-kl", {"kl_noise": -1.0}, r"kl_noise = -1.0: must be in \(0, inf\)"),
        ("dp-ngd-kl", {"probe": 15}, r"probe = 15: must be in \[16, 5000\]"),
        ("dp-ngd-kl", {"probe": 501}, "probe = 501 is more than the 500 public images"),
        ("dp-ngd-kl", {"floor_rank": 0.0}, r"floor_rank = 0.0: must be in \(0, 1\)"),
        ("dp-ngd-kl", {"clip_ratio": 0.0}, r"clip_ratio = 0.0: must be in \(0, inf\)"),
        ("dp-ngd-kl", {"lambda_safe": 0.3}, "lambda_safe = 0.3: dp-ngd-kl does not use it"),
        ("dp-ngd", {"lambda_safe": "aut"}, "lambda_safe = 'aut': must be float, not str"),
        ("dp-ngd-free", {"public": "photos"}, r"dp-ngd-free makes its public images itself \(noise or dead-leaves\)"),
        ("dp-sgd", {"kl_radius": 0.1}, "kl_radius = 0.1: dp-sgd has no public images"),
        ("dp-ngd", {"kl_radius": 0.0}, r"kl_radius = 0.0: must be in \(0, inf\)"),
    ],
)
def test_bad_values_are_refused_in_one_line(method, changes, message):
    with pytest.raises(UsageError, match=message) as caught:
        make(method, **changes)
    assert "\n" not in str(caught.value)


def test_missing_fields_are_all_named():
    with pytest.raises(UsageError, match=r"^a run needs data, eta$"):
        RunConfig.from_dict({k: v for k, v in values("dp-sgd").items() if k not in ("data", "eta")})


def test_an_int_is_a_float_where_one_is_meant():
    assert make(eta=1, p=10).key() == make(eta=1.0, p=10.0).key()
    assert isinstance(make(eta=1).eta, float)
    assert make(T=np.int64(40), eta=np.float64(1.0)).canonical() == make().canonical()


def test_folders_and_deeper_networks_are_allowed():
    assert make(public="photos+folder:here", public_digest="0" * 32).public == "photos+folder:here"
    assert make(model="wrn-22-8").model == "wrn-22-8"
    assert make(model="resnet-32").model == "resnet-32"


def test_replace_checks_again():
    assert make().replace(seed=3).seed == 3
    with pytest.raises(UsageError, match="unknown field 'sed': did you mean 'seed'"):
        make().replace(sed=3)
    with pytest.raises(UsageError, match="dp-sgd does not use it"):
        make().replace(method="dp-sgd")


OTHER = {
    "method": "dp-ngd-pre", "data": "svhn", "model": "wrn-10-1", "epsilon": 3.0, "delta": 1e-6,
    "B": 128, "T": 41, "K": 2, "eta": 1.5, "seed": 1, "N": 1400, "validation": 0.1, "augment": True,
    "ema": 0.99, "evals": 6, "public": "noise", "public_size": 501, "C": 1.1, "lambda_safe": 0.4,
    "lambda_base": 0.05, "T1": 0.2, "p": 9.0, "T_cur": 4, "adadps_e": 1e-7, "C0": 5.0, "C1": 1.0,
    "gep_directions": 50, "pt_steps": 51, "pt_eta": 0.2, "curvature_C": 2.0, "kl_budget": 3.0, "kl_noise": 1.0,
    "probe": 32, "floor_rank": 0.01, "clip_ratio": 0.2, "kl_radius": 0.1,
    "test_share": 0.3, "eta_sgd": 1.5, "C_sgd": 2.0,
}  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
def test_the_key_depends_on_every_field(name):
    if name in config.DIGESTS:
        own = make(data="npz:x", data_digest="0" * 32, public="folder:y", public_digest="0" * 32)
        assert own.replace(**{name: "1" * 32}).key() != own.key()
        with pytest.raises(UsageError, match=f"^{name} = .* needs none, leave it out"):
            make(**{name: "0" * 32})
        return
    method = next(m for m in ("dp-ngd", *METHODS) if name not in METHOD_FIELDS or name in METHODS[m].uses)
    base = make(method, augment=name != "augment", K=1)
    assert base.replace(**{name: OTHER[name]}).key() != base.key()


def test_the_key_depends_on_the_record_version(monkeypatch):
    before = make().key()
    monkeypatch.setattr(config, "RECORD_VERSION", config.RECORD_VERSION + 1)
    assert make().key() != before


def test_the_key_is_the_same_in_another_process():
    code = f"from dpngd.training.config import RunConfig; print(RunConfig.from_dict({values()!r}).key())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == make().key()


def test_the_keys_of_the_shipped_records_are_unchanged():
    """Fields that were added later are None in them, and None is no part of a key."""
    shipped = [json.loads(line) for path in RESULTS if path.stem != "study"
               for line in path.read_text().splitlines()]
    if not shipped:
        pytest.skip("no results are shipped yet")
    for record in shipped:
        assert RunConfig.from_dict(record["config"]).key() == record["key"]


def test_the_key_is_pinned():
    """Shipped results are found by key: if this fails on purpose, raise RECORD_VERSION and recompute them."""
    assert make().key() == "e1d769df99cc8475"


@given(st.permutations(sorted(values())))
def test_the_key_does_not_depend_on_the_order_of_the_fields(order):
    shuffled = {name: values()[name] for name in order}
    assert RunConfig.from_dict(shuffled).key() == make().key()


ANYTHING = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["", "small", "digits", 10**400])


@given(st.dictionaries(st.sampled_from(sorted(FIELDS)), ANYTHING))
def test_whatever_is_passed_is_a_config_or_a_usage_error(changes):
    try:
        made = RunConfig.from_dict({**values(), **changes})
    except UsageError:
        return
    assert RunConfig.from_dict(made.canonical()) == made
