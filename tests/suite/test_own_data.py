"""Notebook 07: what it shows on embedded data."""

import pytest
import torch

from dpngd.clamping import RANK_SHARE
from dpngd.suite import own_data
from dpngd.suite.runs import Runs


@pytest.fixture(scope="module")
def spectra():
    return own_data.spectra()


def test_the_floor_is_at_the_rank_whatever_the_source(spectra):
    assert list(spectra) == list(own_data.SOURCES)
    for s in spectra.values():
        assert (s.values[:-1] >= s.values[1:]).all()
        assert s.above == int(RANK_SHARE * len(s.values)) > 50
        assert s.values[s.above] == pytest.approx(s.floor)
    drawn = own_data.draw_spectra(spectra)
    assert len(drawn.axes[0].get_legend().get_texts()) == 4


def test_public_images_are_what_the_model_takes_and_differ():
    made = {source: own_data.public_images(source) for source in own_data.SOURCES}
    logits = own_data.network()(torch.cat([x[:2] for x in made.values()]))
    assert logits.shape == (8, 10)
    assert len({float(x.std()) for x in made.values()}) == 4


def records(configs, accuracy):
    return [{"key": c.key(), "config": c.canonical(), "status": "ok", "accuracy": accuracy(c),
             "evaluated_on": "validation"} for c in configs]


def test_rates_are_paired_by_the_equation_and_the_free_method_runs_once_per_seed():
    configs = own_data.rate_configs(4.0, [0, 1], 0.25)
    by = {m: [c for c in configs if c.method == m] for m in ("dp-sgd", "dp-ngd", "dp-ngd-free")}
    assert [len(v) for v in by.values()] == [14, 14, 2]
    assert {(c.seed, c.eta / 2) for c in by["dp-sgd"]} == {(c.seed, c.eta) for c in by["dp-ngd"]}
    assert {(c.B, c.T, c.epsilon, c.data, c.evals) for c in configs} == {(256, 40, 4.0, "digits", 1)}
    assert all(c.public == "noise" for c in configs if c.method != "dp-sgd")


def test_the_figure_has_two_curves_and_a_line():
    configs = own_data.rate_configs(4.0, [0, 1], 0.25)
    runs = Runs.of(configs, records(configs, lambda c: 0.5 if c.eta is None else 0.3 + 0.001 * c.eta))
    ax = own_data.draw_rates(runs).axes[0]
    assert len(ax.get_legend().get_texts()) == 3
    assert [line.get_ydata()[0] for line in ax.lines if line.get_linestyle() == "--"] == [50.0]


def test_no_interval_of_the_rates_leaves_what_accuracies_can_be():
    configs = own_data.rate_configs(4.0, [0, 1, 2], 0.25)
    runs = Runs.of(configs, records(configs, lambda c: 0.9 if c.seed and (c.eta or 0) < 9 else 0.1))
    ax = own_data.draw_rates(runs).axes[0]
    shown = [float(t.get_text()) for t in ax.texts]
    assert all(0 <= v <= 100 for v in shown)


@pytest.mark.parametrize(("worst", "said"), [(0.2, True), (0.45, False)])
def test_facts_can_be_false(spectra, worst, said):
    configs = own_data.rate_configs(4.0, [0], 0.25)
    runs = Runs.of(configs, records(configs, lambda c: 0.5 if c.eta is None else worst))
    one, two = torch.zeros(3), torch.tensor([0.0, 0.0, 1e-7])
    facts = own_data.facts(spectra, runs, [one, one])
    assert facts["a wrong rate costs DP-SGD more than 10 points against no rate"] is said
    assert facts["the wrapped rate has no effect"] is True
    assert own_data.facts(spectra, runs, [one, two])["the wrapped rate has no effect"] is False
    far = {"noise": spectra["noise"], "photos": own_data.Spectrum(spectra["photos"].values, 0.01)}
    found = own_data.facts(far, runs, [one])
    assert not found["the floor is at the rank for every source"]
    assert not found["natural-looking sources give floors within a factor of 4"]


def test_the_weights_are_those_of_the_program_at_any_rate():
    slow, fast = own_data.weights_at([0.1, 10.0], steps=2)
    assert torch.equal(slow, fast)
    start = torch.cat([p.detach().flatten() for p in own_data.network().parameters()])
    assert not torch.equal(slow, start)
