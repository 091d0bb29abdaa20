"""Whole audits of the product, the command, and what it says of a release on disk."""

import json
import struct

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dpngd import audit, noise
from dpngd.audit import checks, command, leaks, report
from dpngd.audit import optimizer as opacus_checks
from dpngd.audit.checks import LEVEL, Result
from dpngd.audit.subject import Subject, images, targets
from dpngd.errors import UsageError, exit_code

pytestmark = pytest.mark.filterwarnings("ignore")  # Opacus warns about itself in many places


def failed_lines(result):
    return [line.line() for line in result.failures]


@pytest.mark.parametrize("name", ["dp-sgd", "gep", "dp-ngd", "dp-ngd-private-20", "dp-ngd-free"])
def test_a_method_passes(name):
    result = report.audit_method(name, n=200, seed=5)
    assert failed_lines(result) == []
    assert {line.test for line in result.lines} >= {
        "sensitivity", "post-processing", "float32 tail", "canary, mu", "canary, epsilon", "independence", "accounting",
        "releases", "state", "end to end", "loop, releases", "loop, record"}


def test_the_sampler_and_the_opacus_optimizer_pass():
    assert all(line.passed for line in checks.inclusion(Subject("dp-sgd"), seed=5))
    result = audit.audit_opacus(n=200)
    assert failed_lines(result) == []
    assert {"interrupted step", "virtual steps", "buffers", "resume, any two", "public images",
            "accounting"} <= {line.test for line in result.lines}


def test_the_secret_noise_passes():
    subjects = [Subject(m, noise=leaks.secret_noise) for m in ("dp-sgd", "dp-ngd")]
    assert [line.line() for line in checks.across_runs(subjects, "release mode") if not line.passed] == []


def test_the_loop_in_release_mode_passes():
    lines = checks.release_loop()
    assert [line.line() for line in lines if not line.passed] == []
    assert len(lines) == 4
    assert all(line.passed for line in checks.inclusion(Subject("dp-sgd"), source=noise.secret_uniform))


def test_a_resumed_run_passes_and_noise_on_other_sums_is_found(monkeypatch):
    lines = checks.resume_loop()
    assert [line.line() for line in lines if not line.passed] == []
    assert [line.test for line in lines] == ["resume, dp-sgd", "resume, dp-ngd-private-20"]
    assert "1 releases done again alike, 0 with other sums, [6] in all" in lines[0].measured
    # The noise goes on from its start while the weights go on from the checkpoint: a vector meets another sum.
    monkeypatch.setattr(noise.SeededNoise, "load_state_dict", lambda self, state: None)
    bad = checks.resume_loop()[0]
    assert not bad.passed
    assert "0 with other sums" not in bad.measured


def test_an_audit_leaves_the_optimizer_as_it_was():
    bench, engine = leaks.opacus_parts()
    optimizer, model, x, y = bench.optimizer, bench.model, bench.x, bench.y
    optimizer.zero_grad()
    F.cross_entropy(model(x[:9]), y[:9]).backward()
    optimizer.step()
    weights = [p.detach().clone() for p in model.parameters()]
    t, history, hook = optimizer.t, list(engine.accountant.history), optimizer.step_hook
    numbers = optimizer.noise_multiplier, optimizer.max_grad_norm
    audit.audit(optimizer, model, x, y, n=20)
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert (optimizer.t, engine.accountant.history) == (t, history)
    assert optimizer.step_hook == hook
    assert (optimizer.noise_multiplier, optimizer.max_grad_norm) == numbers
    assert "add_noise" not in vars(optimizer)
    optimizer.zero_grad()
    F.cross_entropy(model(x[:9]), y[:9]).backward()
    optimizer.step()
    assert optimizer.t == t + 1
    assert any(not torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))


@pytest.mark.parametrize(("few", "sees"), [(20, "nothing: 20 samples are too few, give 80 or more"),
                                           (96, "missing noise")])
def test_few_samples_prove_nothing_from_end_to_end_and_the_line_says_so(few, sees):
    bench = leaks.opacus()
    bench.x, bench.y = bench.x[:few], bench.y[:few]
    (line,) = leaks.held(opacus_checks.end_to_end, lambda: bench)
    assert line.passed
    assert line.power == sees


def test_a_users_audit_refuses_what_it_cannot_audit():
    bench = leaks.opacus()
    with pytest.raises(UsageError, match="make_private"):
        audit.audit(torch.optim.SGD(bench.model.parameters(), lr=1), bench.model, bench.x, bench.y)
    with pytest.raises(UsageError, match="at least 9"):
        audit.audit(bench.optimizer, bench.model, bench.x[:4], bench.y[:4])


def test_a_seeded_generator_is_no_release():
    bench = leaks.opacus()
    bench.optimizer.generator = torch.Generator().manual_seed(0)
    lines = {r: leaks.optimizer.source(bench, release=r)[0].passed for r in (False, True)}
    assert lines == {False: True, True: False}


def test_levels_add_up():
    assert checks.TESTS * LEVEL <= checks.FALSE_ALARM * (1 + 1e-9) < 0.01
    line = Result("m", "t", "1", "2", True, level=LEVEL)
    many = audit.Report([line] * (checks.TESTS + 1))
    with pytest.raises(UsageError, match="statistical tests"):
        many.summary()


def test_a_method_without_a_value_for_a_field_is_named(monkeypatch):
    import dpngd.audit.subject as subject

    monkeypatch.setattr(subject, "VALUES", {k: v for k, v in subject.VALUES.items() if k != "C0"})
    with pytest.raises(UsageError, match="no value for C0 of gep"):
        Subject("gep").config(epsilon=1.0, T=1, B=1)


# ---- The command.


def test_bad_options_are_one_line(capsys):
    for argv, text in ((["--method", "dp-sdg"], "dp-sgd"), (["--seconds", "0"], "--seconds"),
                       (["--jobs", "0"], "--jobs"), (["--release", "nowhere"], "not a folder"),
                       (["--seed", "-1"], "--seed")):
        assert exit_code(lambda argv=argv: command.main(argv)) == 2
        error = capsys.readouterr().err
        assert text in error
        assert error.count("\n") == 1


def scripted(monkeypatch, passed):
    line = Result("dp-sgd", "noise", "0.98", "1", passed, level=LEVEL)
    result = audit.Report([line], {"dp-sgd": ([1.0, 2.0], [0.0, 0.5], 1.0)}, 0.1)

    def methods(names, **_):
        _["show"](line)
        return result

    monkeypatch.setattr(report, "audit_methods", methods)


@pytest.mark.parametrize("passed", [True, False])
def test_a_failure_is_exit_code_1(monkeypatch, capsys, passed):
    scripted(monkeypatch, passed)
    assert command.main(["--method", "dp-sgd"]) == (0 if passed else 1)
    out = capsys.readouterr().out
    assert ("pass" if passed else "FAIL") in out
    assert "1e-05" in out


def test_table_and_figure(monkeypatch, capsys, tmp_path):
    pytest.importorskip("matplotlib").use("Agg")
    scripted(monkeypatch, True)
    figure = tmp_path / "canary.png"
    command.main(["--method", "dp-sgd", "--json", "--figure", str(figure)])
    table = json.loads(capsys.readouterr().out)
    assert table["passed"]
    assert table["level"] == LEVEL
    assert table["lines"][0]["measured"] == "0.98"
    assert figure.stat().st_size > 1000
    with pytest.raises(UsageError, match="no canary"):
        audit.Report().figure(figure)


def test_a_missed_leak_fails_the_self_test(monkeypatch, capsys):
    clean = lambda: [Result("m", "t", "1", "2", True)]  # noqa: E731
    monkeypatch.setattr(leaks, "leaks", lambda: [leaks.Leak("nothing planted", "t", clean, clean, "0")])
    assert command.main(["--self-test"]) == 1
    assert "MISSED" in capsys.readouterr().out


# ---- A release on disk.

PRIVACY = {"epsilon": 4.03, "delta": 1e-5, "q": 0.125, "sigma": 1.0, "T": 16, "accountant": "prv"}


def write_release(folder, card=None, tensors=None):
    folder.mkdir(exist_ok=True)
    data, header, at = b"", {}, 0
    for name, values in (tensors or {"0.weight": np.ones(3, np.float32)}).items():
        raw = values.astype("<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [at, at + len(raw)]}
        data, at = data + raw, at + len(raw)
    text = json.dumps(header).encode()
    (folder / "weights.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    (folder / "card.json").write_text(json.dumps(card or {"privacy": PRIVACY}))
    return folder


def failures(folder):
    return [line.test for line in audit.audit_release(folder).failures]


def test_a_clean_release_passes(tmp_path):
    assert failures(write_release(tmp_path / "out")) == []
    parts = {**PRIVACY, "sigma": 9.0, "releases": [{"purpose": "gradients", "sigma": 1.0, "releases": 16}]}
    assert failures(write_release(tmp_path / "parts", {"model": {"privacy": parts}})) == []


@pytest.mark.parametrize(("card", "tensors", "test"), [
    ({"privacy": {**PRIVACY, "epsilon": 3.9}}, None, "accounting"),
    ({"privacy": {"epsilon": 1.0}}, None, "accounting"),
    ({"privacy": {**PRIVACY, "releases": [{"sigma": 1.0, "releases": 16}, {"sigma": 1.5, "releases": 4}]}}, None,
     "accounting"),
    ({"privacy": PRIVACY, "config": {"seed": 3}}, None, "fields"),
    ({"privacy": PRIVACY, "data": [{"digest": "abc"}]}, None, "fields"),
    (None, {"1.running_mean": np.zeros(2, np.float32)}, "weights"),
    (None, {"0.weight": np.array([np.nan], np.float32)}, "weights"),
])
def test_a_faulty_release_fails(tmp_path, card, tensors, test):
    assert failures(write_release(tmp_path / "out", card, tensors)) == [test]


@pytest.mark.parametrize("change", [lambda raw: raw[:-4], lambda raw: raw + b"leak",
                                    lambda raw: raw[:9] + b"!" + raw[10:],
                                    lambda raw: raw.replace(b'"F32"', b'"F16"')])
def test_weights_that_are_cut_or_hold_more_are_refused(tmp_path, change):
    folder = write_release(tmp_path / "out")
    path = folder / "weights.safetensors"
    path.write_bytes(change(path.read_bytes()))
    (failed,) = audit.audit_release(folder).failures
    assert "not a whole safetensors file" in failed.line()


def test_other_files_in_a_release_are_named(tmp_path):
    folder = write_release(tmp_path / "out")
    (folder / "state.pt").write_bytes(b"x")
    assert failures(folder) == ["files"]
    (folder / "state.pt").unlink()
    (folder / "card.json").write_text("{")
    with pytest.raises(UsageError, match="not JSON"):
        report.release_checks.folder(folder)
    (folder / "card.json").unlink()
    with pytest.raises(UsageError, match="a release has both"):
        report.release_checks.folder(folder)


def test_samples_are_the_same_at_every_call():
    assert torch.equal(images(3, "a"), images(3, "a"))
    assert torch.equal(targets(3, "a"), targets(3, "a"))
    assert not torch.equal(images(3, "a"), images(3, "b"))
