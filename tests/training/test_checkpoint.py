"""A run that is interrupted goes on from its checkpoint and ends as if it had not been; other runs' are refused."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dpngd.errors import UsageError, exit_code
from dpngd.methods import METHODS
from dpngd.noise import SeededNoise
from dpngd.suite import profiles
from dpngd.training import checkpoint as checkpoints
from dpngd.training import train
from dpngd.training.checkpoint import NAME, Checkpoint
from dpngd.training.command import main
from dpngd.training.recipe import Views
from dpngd.training.train import Batches, load, run

QUICK = profiles.load("quick")
FAST = {"T": 7, "B": 64, "evals": 3}
SMALL = {"public_size": 60, "probe": 16, "gep_directions": 20, "pt_steps": 5, "T_cur": 3,
         "kl_noise": 1e6}  # the noise must not decide the length of a step: its search would have nothing to do
RESUMED = ["dp-sgd", "adadps", "gep", "dp-ngd", "dp-ngd-labels-exact", "dp-ngd-private-20", "dp-ngd-auto",
           "dp-ngd-free", "adadps-kl"]
KILLED = Path(__file__).parents[1] / "helpers" / "killed_runs.py"


def config(method="dp-sgd", **changes):
    small = {k: v for k, v in SMALL.items() if k in METHODS[method].uses}
    return QUICK.config(method, "digits", 2.0, 0, **{**FAST, **small, **changes})


class Interrupted(Exception):
    pass


def interrupted_run(wanted, folder, steps, every=1):
    """A run that ends inside step `steps`, before that step's checkpoint."""

    def progress(step, loss, epsilon):
        if step == steps:
            raise Interrupted

    with pytest.raises(Interrupted):
        run(wanted, progress=progress, checkpoint=Checkpoint(folder, every))


def header(folder):
    return json.loads((folder / NAME).read_bytes().partition(b"\n")[0])


def facts_and_weights(wanted, **options):
    done = train.train(wanted, **options)
    return done.record.facts(), {name: w.clone() for name, w in done.model.state_dict().items()}


def same(one, other):
    return one[0] == other[0] and all(torch.equal(w, other[1][name]) for name, w in one[1].items())


@pytest.fixture(scope="module")
def half_done(tmp_path_factory):
    """A DP-SGD run with a checkpoint after step 2 of 7."""
    folder = tmp_path_factory.mktemp("half")
    interrupted_run(config(), folder, 3)
    return (folder / NAME).read_bytes()


@pytest.fixture
def place(half_done, tmp_path):
    (tmp_path / NAME).write_bytes(half_done)
    return tmp_path


@pytest.mark.parametrize("method", RESUMED)
def test_an_interrupted_run_ends_as_an_uninterrupted_one(method, tmp_path):
    """Interrupted in step 3 and, resumed, in step 6, each between two refreshes: facts and weights are the same, bit
    for bit, and no step that is in a checkpoint is done again."""
    wanted = config(method)
    interrupted_run(wanted, tmp_path, 3)
    interrupted_run(wanted, tmp_path, 6, every=2)
    assert header(tmp_path)["step"] == 4
    steps = []
    resumed = facts_and_weights(wanted, checkpoint=Checkpoint(tmp_path, 1),
                                progress=lambda step, *_: steps.append(step))
    assert steps == [5, 6, 7]
    assert same(resumed, facts_and_weights(wanted))


@pytest.mark.parametrize(("method", "part"), [
    ("dp-ngd-private-20", part) for part in ("weights", "average", "batches", "curvature batches", "noise", "log",
                                             "natural", "labels", "curvature-noise")
] + [("gep", "basis"), ("adadps", "scale"), ("dp-ngd-free", "steps")])
def test_every_part_is_needed(method, part, tmp_path, monkeypatch, wholes):
    """Without any one part, the resumed run is another, or none: so the test above would see it missing."""
    wanted = config(method)
    (tmp_path / NAME).write_bytes(wholes(method)[1])
    put = Checkpoint.resume

    class Nothing:
        def load_state_dict(self, state):
            pass

    def resume(self, config, held, *rest):
        step = put(self, config, {**held, part: Nothing()}, *rest)
        self.held = None  # and nothing is written
        return step

    monkeypatch.setattr(Checkpoint, "resume", resume)
    try:
        assert not same(facts_and_weights(wanted, checkpoint=Checkpoint(tmp_path, 1)), wholes(method)[0])
    except (IndexError, ValueError):  # a geometry or a log that is empty in the middle of a run
        assert part in ("basis", "scale", "log")


@pytest.fixture(scope="module")
def wholes(tmp_path_factory):
    """By method: what an uninterrupted run gives, and the checkpoint after step 5 of 7 (refreshes are at 3 and 6)."""
    found = {}

    def get(method):
        if method not in found:
            folder = tmp_path_factory.mktemp(method)
            interrupted_run(config(method), folder, 6)
            found[method] = facts_and_weights(config(method)), (folder / NAME).read_bytes()
        return found[method]

    return get


def test_every_builder_is_among_them():
    assert {METHODS[method].builder for method in RESUMED} == {method.builder for method in METHODS.values()}


def test_killed_five_times_at_random_moments(tmp_path):
    done = subprocess.run([sys.executable, KILLED, tmp_path, "17", "dp-ngd", "40"], capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert len(told["killed_after"]) == 5
    assert told["killed_after"] == sorted(told["killed_after"])
    assert told["killed_after"][-1] < 40
    assert told["facts"] == told["whole"]


def test_a_finished_run_is_told_again_without_a_step(tmp_path):
    first = run(config(), checkpoint=Checkpoint(tmp_path, 4))
    assert header(tmp_path)["step"] == 7, "also after the last step"
    again = run(config(), checkpoint=Checkpoint(tmp_path, 4), progress=lambda *_: pytest.fail("a step"))
    assert again.facts() == first.facts()
    assert again.seconds["gradients"] == first.seconds["gradients"] > 0
    assert again.seconds["setup"] > first.seconds["setup"]


def test_batches_go_on_with_their_views(monkeypatch):
    monkeypatch.setattr(train, "views_of", lambda data: Views(pad=1, flip=False))
    wanted = config().replace(augment=True, K=2)
    private, _ = load(wanted)
    one, other = Batches(private, wanted), Batches(private, wanted)
    list(one.draw())
    other.load_state_dict(one.state_dict())
    for (x, y), (x2, y2) in zip(one.draw(), other.draw(), strict=True):
        assert torch.equal(x, x2)
        assert torch.equal(y, y2)


@pytest.mark.parametrize("draws", [0, 1, 5])
def test_seeded_noise_goes_on_where_it_was(draws):
    like, one, other = torch.zeros(7), SeededNoise(3), SeededNoise(4)
    for _ in range(draws):
        one(like, 1.0)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert torch.equal(one(like, 2.0), other(like, 2.0))


# ---- What is refused: one line, and the file stays as it is ---------------------------------------------------------


def refusal(wanted, folder):
    before = (folder / NAME).read_bytes()
    with pytest.raises(UsageError) as error:
        run(wanted, checkpoint=Checkpoint(folder, 1), progress=lambda *_: pytest.fail("a step"))
    assert (folder / NAME).read_bytes() == before
    assert "\n" not in str(error.value)
    return str(error.value)


def test_another_config(place):
    told = refusal(config().replace(seed=1), place)
    assert told.startswith(f"{place / NAME} is of another run, {config().label()}: name another folder, or remove it")


@pytest.mark.parametrize(("name", "value", "message"), [
    ("RECORD_VERSION", 99, "is of another version of dpngd"), ("FORMAT", 99, "is of another version of dpngd"),
    ("rounding", lambda: "elsewhere", "is of a machine that rounds differently")])
def test_another_version_or_machine(place, monkeypatch, name, value, message):
    monkeypatch.setattr(checkpoints, name, value)
    assert message in refusal(config(), place)


def test_other_data(place, monkeypatch):
    monkeypatch.setattr(train, "load", lambda c: (dataclasses.replace(load(c)[0], digest="other"), None))
    assert "is of other data" in refusal(config(), place)


@pytest.mark.parametrize("damage", [
    lambda raw: b"", lambda raw: raw[:100], lambda raw: raw[:-1], lambda raw: raw + b"x", lambda raw: b"[1]\n" + raw,
    lambda raw: raw[:-5000] + bytes([raw[-5000] ^ 1]) + raw[-4999:],
    lambda raw: raw.replace(b'"step": 2', b'"step": 3', 1)])
def test_a_damaged_one(place, damage):
    (place / NAME).write_bytes(damage((place / NAME).read_bytes()))
    assert "is damaged" in refusal(config(), place)


def test_a_sweeps_own_starts_again_instead(place, caplog):
    (place / NAME).write_bytes((place / NAME).read_bytes()[:-1])
    steps = []
    run(config(), checkpoint=Checkpoint(place, 1, automatic=True), progress=lambda step, *_: steps.append(step))
    assert steps[0] == 1
    assert "is damaged (its checksum differs): the run starts again" in caplog.text
    assert header(place)["step"] == 7


def test_a_method_that_does_not_say_what_it_holds(tmp_path, monkeypatch):
    build = train.build
    monkeypatch.setattr(train, "build", lambda setting: dataclasses.replace(build(setting), held=None))
    with pytest.raises(UsageError, match="dp-sgd cannot be resumed: its builder does not say what it holds"):
        run(config(), checkpoint=Checkpoint(tmp_path, 1))
    run(config(), checkpoint=Checkpoint(tmp_path, 1, automatic=True))
    assert list(tmp_path.iterdir()) == []


def test_a_release_has_none(tmp_path):
    with pytest.raises(UsageError, match="a release has no checkpoints"):
        run(config(), noise="secret", checkpoint=Checkpoint(tmp_path, 1))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file_and_a_disk_that_is_full(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"file cannot hold checkpoints .*: name a folder"):
        run(config(), checkpoint=Checkpoint(tmp_path / "file", 1))

    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "write_atomically", full)
    with pytest.raises(UsageError, match=r"cannot be written after step 2 \(No space left on device\): make room"):
        run(config(), checkpoint=Checkpoint(tmp_path, 2))


def test_what_a_killed_process_left_half_written_is_removed(place):
    old, young = place / ".tmp-old", place / ".tmp-young"
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 3600,) * 2)
    run(config(), checkpoint=Checkpoint(place, 1))
    assert not old.exists()
    assert young.exists(), "it may be of a process that is still writing"


# ---- The command line ------------------------------------------------------------------------------------------------

OPTIONS = ["--method", "dp-sgd", "--T", "4", "--B", "64", "--evals", "1", "--json"]


def test_the_same_command_goes_on(tmp_path, capsys, monkeypatch):
    options = [*OPTIONS, "--checkpoint", str(tmp_path / "new"), "--every", "2"]
    after = Checkpoint.after

    def stop(self, step):
        after(self, step)
        if step == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "after", stop)
        assert exit_code(lambda: main(options)) == 130
    assert header(tmp_path / "new")["step"] == 2
    capsys.readouterr()
    assert main(options) == 0
    resumed = capsys.readouterr()
    assert "steps: 4 of 4" in resumed.err, "the bar counts the steps before"
    assert main([*OPTIONS, "--quiet"]) == 0
    whole = json.loads(capsys.readouterr().out)
    resumed = json.loads(resumed.out)
    assert {k: v for k, v in resumed.items() if k not in ("seconds", "where")} == {
        k: v for k, v in whole.items() if k not in ("seconds", "where")}


@pytest.mark.parametrize(("options", "message"), [
    (["--every", "5"], "--every is for checkpoints: give --checkpoint DIR too"),
    (["--checkpoint", "x", "--every", "0"], "--every is 0: it must be at least 1"),
    (["--checkpoint", "x", "--release", "y"], "--checkpoint beside --release: a release's noise cannot be drawn again"),
])
def test_options_that_do_not_go_together(options, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert exit_code(lambda: main(options)) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: {message}")
    assert told.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
