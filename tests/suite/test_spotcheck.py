"""Shipped runs come out again, and it is noticed when they do not."""

import json

import pytest
import torch

from dpngd.errors import UsageError
from dpngd.suite import profiles, spotcheck
from dpngd.suite.store import Store
from dpngd.training import record
from dpngd.training.train import run


@pytest.fixture(scope="module")
def computed():
    """Two real runs of quick, shortened."""
    quick = profiles.load("quick")
    configs = [quick.config(m, "digits", 4, 0, T=2, evals=1) for m in ("dp-sgd", "dp-ngd")]
    return [(config, run(config).to_dict()) for config in configs]


@pytest.fixture
def shipped(computed, tmp_path):
    """A store that ships them; `change` edits a record before it is written."""
    def make(change=lambda r: None):
        made = Store("quick", root=tmp_path / "made", results=tmp_path / "results")
        for config, facts in computed:
            facts = json.loads(json.dumps(facts))
            change(facts)
            made.put(config, facts)
        made.export()
        return Store("quick", root=tmp_path / "empty", results=tmp_path / "results")
    return make


def test_runs_come_out_again(shipped):
    found = spotcheck.train_again(shipped(), 2, 0, 1)
    assert found["good"]
    out = spotcheck.table(found)
    assert out.count("the same to the last bit") == 2
    assert "verdicts changed: none" in out


def test_a_number_that_was_changed_is_found(shipped):
    def change(record):
        record["train_loss"][1] += 1e-9
    found = spotcheck.train_again(shipped(change), 2, 0, 1)
    assert not found["good"]
    assert spotcheck.table(found).count("differs in train_loss") == 2


def test_another_machine_may_round_otherwise(shipped):
    def change(record):
        record["train_loss"][1] += 1e-9
        record["where"]["rounding"] = "another"
    found = spotcheck.train_again(shipped(change), 1, 0, 1)
    assert found["good"]
    assert "differs in train_loss (another machine, or other threads)" in spotcheck.table(found)


def forged_accuracy(record):
    record["accuracy"] = 0.999
    record["evaluations"][-1]["accuracy"] = 0.999


def forged_sigma(record):
    record["privacy"]["sigma"] *= 1 - 1e-12


def forged_epsilon(record):
    record["privacy"]["parts"][0]["epsilon_prv"] -= 1e-3


def forged_mark(record):
    record["privacy"]["simulation"] = False


def forged_status(record):
    record["status"], record["accuracy"] = "diverged", None


@pytest.mark.parametrize(("change", "field"), [(forged_accuracy, "accuracy"), (forged_sigma, "privacy"),
                                               (forged_epsilon, "privacy"), (forged_mark, "privacy"),
                                               (forged_status, "status, accuracy")])
def test_a_forged_record_does_not_hide_behind_another_machine(shipped, change, field):
    def forge(record):
        change(record)
        record["where"]["rounding"] = "another"
    found = spotcheck.train_again(shipped(forge), 1, 0, 1)
    assert not found["good"]
    assert f"WRONG, on any machine: {field}" in spotcheck.table(found)


def test_the_tolerance_of_another_machine():
    old = {"key": "k", "config": {}, "privacy": {"sigma": 1.0, "parts": [{"T": 3}]}, "status": "ok", "accuracy": 0.5}
    assert spotcheck.wrong(old, {**old, "accuracy": 0.525}) == []
    assert spotcheck.wrong(old, {**old, "accuracy": 0.465}) == ["accuracy"]
    for sigma in (1 + 1e-15, 1, "1.0"):
        assert spotcheck.wrong(old, {**old, "privacy": {"sigma": sigma, "parts": [{"T": 3}]}}) == ["privacy"]
    assert spotcheck.wrong(old, {**old, "privacy": {"parts": [{"T": 3}], "sigma": 1.0}}) == [], "in any order"
    assert spotcheck.wrong(old, {**old, "privacy": {"sigma": 1.0, "parts": [{"T": 4}]}}) == ["privacy"]
    assert spotcheck.wrong(old, {**old, "privacy": {"sigma": 1.0, "parts": []}}) == ["privacy"]


def test_other_images_are_another_run():
    """Files differ from version to version; images that are made may round otherwise, and private names have parts."""
    def record(private, public, data="svhn", images="cifar100+imagenet"):
        return {"config": {"data": data, "public": images},
                "data": {"private": {"digest": private}, "public": {"digest": public}}}

    assert spotcheck.same_images(record("a", "b"), record("a", "b"))
    assert not spotcheck.same_images(record("a", "b"), record("c", "b"))
    assert not spotcheck.same_images(record("a", "b"), record("a", "c"))
    assert not spotcheck.same_images(record("a", "b", "utkface-age"), record("c", "b", "utkface-age"))
    assert spotcheck.same_images(record("a", "b", images="noise"), record("a", "c", images="noise"))
    assert spotcheck.same_images(record("a", "b", "digits"), record("c", "b", "digits")), "no file"
    assert not spotcheck.same_images(record("a", "b", "digits"), record("a", "c", "digits"))


def test_a_c_that_is_found_on_public_images_may_round_otherwise():
    """dp-ngd-free on two machines: the sixth digit of C differs, and nothing else of what is spent may."""
    spent = {"sigma": 2.0, "q": 0.1, "sensitivity": [1.2638379], "noise_std": [2.5276758]}
    old = {"key": "k", "config": {"clip_ratio": 0.05}, "privacy": spent, "status": "ok", "accuracy": 0.5}

    def judged(fixed=(), **change):
        config = {k: v for k, v in old["config"].items() if k not in fixed}
        return spotcheck.wrong({**old, "config": config, "privacy": {**spent, **change}}, {**old, "config": config})

    assert judged(sensitivity=[1.2638343], noise_std=[2.5276686]) == []
    assert judged(["clip_ratio"], sensitivity=[1.2638343], noise_std=[2.5276686]) == ["privacy"], "C is stated there"
    assert judged(sensitivity=[1.29], noise_std=[2.58]) == ["privacy"], "more than rounding"
    assert judged(noise_std=[2.5276]) == ["privacy"], "noise that is not sigma C"
    assert judged(sensitivity=[], noise_std=[]) == ["privacy"]
    assert judged(sensitivity=[1.2638343], noise_std=[2.5276686], sigma=2.0 + 1e-12) == ["privacy"]
    assert judged(sensitivity=[1.2638343], noise_std=[2.5276686], q=0.2) == ["privacy"]


def test_other_threads_may_round_otherwise(shipped):
    def change(record):
        record["train_loss"][1] += 1e-9
        record["where"]["threads"] += 1
    found = spotcheck.train_again(shipped(change), 1, 0, 1)
    assert found["good"]
    assert "differs in train_loss (another machine, or other threads)" in spotcheck.table(found)


def test_the_name_of_a_processor_does_not_make_it_the_same_machine(shipped):
    """Records from before the digest: two machines called alike did round differently."""
    def change(record):
        record["train_loss"][1] += 1e-9
        del record["where"]["rounding"]
    found = spotcheck.train_again(shipped(change), 1, 0, 1)
    assert found["good"]
    assert "(another machine, or other threads)" in spotcheck.table(found)


def test_the_digest_of_rounding_is_of_numbers(monkeypatch):
    here = record.rounding()
    record.rounding.cache_clear()
    assert record.rounding() == here, "the same machine, the same digest"
    monkeypatch.setattr(torch, "bmm", lambda a, b: torch.nextafter(a @ b, torch.tensor(torch.inf)))
    record.rounding.cache_clear()
    assert record.rounding() != here, "a last bit changes it"
    record.rounding.cache_clear()


def test_which_runs_depends_on_the_seed_alone(shipped):
    store = shipped()
    assert [r["key"] for r in spotcheck.draw(store, 2, 3)] == [r["key"] for r in spotcheck.draw(store, 2, 3)]
    with pytest.raises(UsageError, match="--runs is 3: take from 1 to the 2 that are shipped"):
        spotcheck.draw(store, 3, 0)


def test_nothing_to_check(tmp_path):
    with pytest.raises(UsageError, match="quick ships no results"):
        spotcheck.draw(Store("quick", results=tmp_path), 1, 0)


def test_only_runs_whose_data_are_here_are_drawn(shipped, monkeypatch, capsys):
    store = shipped()
    elsewhere = {k: {**r, "config": {**r["config"], "data": "utkface-age"}} for k, r in store.shipped.items()}
    mine = next(iter(store.shipped))
    monkeypatch.setattr(spotcheck, "missing_data", lambda names: sorted(names))
    store.shipped.update({k: r for k, r in elsewhere.items() if k != mine})
    assert [r["key"] for r in spotcheck.draw(store, 1, 0)] == [mine]
    assert "1 of 2 shipped runs can be trained here; the others need utkface" in capsys.readouterr().err
    with pytest.raises(UsageError, match=r"take from 1 to the 1 that are shipped \(others need utkface, not found\)"):
        spotcheck.draw(store, 2, 0)
    store.shipped.update(elsewhere)
    with pytest.raises(UsageError, match="none of the 2 shipped runs can be trained here: utkface not found"):
        spotcheck.draw(store, 1, 0)


def test_missing_data_are_found_without_a_download(tmp_path, monkeypatch):
    monkeypatch.setenv("DPNGD_DATA", str(tmp_path))
    monkeypatch.setattr("dpngd.data.sources.folders", lambda root=None: [tmp_path])
    assert spotcheck.needs({"data": "utkface-age", "public": "cifar100+photos"}) == {"utkface", "cifar100"}
    assert spotcheck.needs({"data": "digits"}) == set()
    assert spotcheck.missing_data({"utkface", "cifar100"}) == ["cifar100", "utkface"]
    assert list(tmp_path.iterdir()) == []
