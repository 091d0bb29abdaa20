"""`dpngd train`: options, errors in one line, the table and the JSON."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from dpngd.errors import exit_code
from dpngd.methods import METHODS
from dpngd.suite import profiles
from dpngd.training.command import main, parse, summary, with_defaults
from dpngd.training.config import DIGESTS, FIELDS
from dpngd.training.train import run

FAST = ["--T", "3", "--B", "64", "--evals", "1", "--quiet"]


def python(*options):
    return subprocess.run([sys.executable, "-m", "dpngd", "train", *options], capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_one_run_from_the_command_line_with_its_bar_and_table():
    done = python("--method", "dp-sgd", "--data", "digits", "--epsilon", "3", *FAST[:-1])
    assert done.returncode == 0, done.stderr
    first, last = done.stderr.splitlines()
    assert re.fullmatch(r"dp-sgd on digits: 3 steps of about \d+ images, epsilon 3; about \d+ seconds left", first)
    assert re.fullmatch(r"steps: 3 of 3, 0:\d\d so far; loss [\d.]+, epsilon (2\.999|3\.000)", last)
    assert "\r" not in done.stderr, "a log file holds whole lines"
    lines = done.stdout.splitlines()
    assert lines[0].startswith("run                 dp-sgd on digits (N = 1437), small, 24,314 parameters")
    assert lines[1].startswith("test accuracy       ")
    (spent,) = [re.fullmatch(r"privacy {13}epsilon ([\d.]+) \(PRV\), [\d.]+ \(RDP\) at delta 1e-05", x) for x in lines
                if x.startswith("privacy")]
    assert 2.99 < float(spent[1]) <= 3.0


def test_json_is_the_whole_record(capsys):
    options = ["--method", "dp-ngd-private-20", "--public_size", "60"]
    assert main(["--method", "dp-ngd-private-20", "--json", *FAST]) == 0
    record = json.loads(capsys.readouterr().out)
    config, _ = parse(["--method", "dp-ngd-private-20", *FAST])
    assert record["key"] == config.key()
    assert [part["purpose"] for part in record["privacy"]["parts"]] == ["gradients", "curvature"]
    assert exit_code(lambda: main(options)) == 2  # this arm has no public set
    assert "dp-ngd-private-20 does not use it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "dp-ngdd"], "unknown method 'dp-ngdd': did you mean 'dp-ngd'?"),
        (["--metod", "dp-ngd"], "unknown option '--metod': did you mean '--method'?"),
        (["--meth=dp-ngd"], "unknown option '--meth': did you mean '--method'?"),
        (["--T", "many"], "argument --T: invalid int value: 'many'"),
        (["--T"], "argument --T: expected one argument"),
        (["--T", "0"], "T = 0: must be in [1, inf)"),
        (["--epsilon", "nan"], "epsilon = nan: must be in (0, inf)"),
        (["--epsilon", "-1"], "epsilon = -1.0: must be in (0, inf)"),
        (["--data", "digit"], "unknown data set 'digit': did you mean 'digits'?"),
        (["--public", "photo"], "unknown public data set 'photo': did you mean 'photos'?"),
        (["--public_size", "3"], "public_size = 3: must be in [50, 5000]"),
        (["--method", "dp-sgd", "--public", "photos"], "public = 'photos': dp-sgd does not use it, leave it out"),
        (["--model", "smal"], "unknown model 'smal': did you mean 'small'?"),
        (["--profile", "quik"], "'quik'"),
        (["--threads", "0"], "--threads is 0: it must be at least 1"),
        (["dp-ngd"], "unexpected argument 'dp-ngd': options start with --"),
        (["--augment"], "digits has no views that keep its labels"),
        (["--B", "2000"], "B = 2000 is more than the 1437 private training samples"),
        (["--method", "gep", "--gep-directions", "999999"], "so at most public_size = 500"),
        (["--data", "npz:"], "'npz:' names no path: write npz:PATH"),
        (["--data", "folder:"], "'folder:' names no path: write folder:PATH"),
        (["--public", "folder:"], "'folder:' names no path: write folder:PATH"),
        (["--public", "npz:not-here.npz"], "not-here.npz: there is no such file"),
        (["--lambda_base", "7"], "lambda_base = 7.0 is above lambda_safe"),
    ],
)
def test_bad_options_exit_2_with_one_line(capsys, options, message):
    assert exit_code(lambda: main([*options, "--quiet"])) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_exit_code_of_the_process():
    done = python("--method", "gpe")
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean 'gep'?" in done.stderr


def test_every_field_is_an_option_in_both_spellings():
    assert parse(["--public-size", "77"])[0] == parse(["--public_size", "77"])[0]
    with pytest.raises(SystemExit) as done:
        parse(["--help"])
    assert done.value.code == 0


def test_help_names_every_field_and_method(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    text = capsys.readouterr().out
    assert all((f"--{name}" in text) == (name not in DIGESTS) for name in FIELDS)
    assert all(f"  {name} " in text for name in METHODS)


@pytest.mark.parametrize("method", METHODS)
def test_defaults_are_the_profiles(method):
    assert with_defaults({"method": method}) == profiles.load("quick").config(method, "digits", 2.0, 0)


def test_what_follows_from_an_option_follows_from_the_given_one():
    """The rate from the floor, the floor's base from the floor; cpu is the profile of the paper's data sets."""
    plain, lower = with_defaults({}), with_defaults({"lambda_safe": 0.03})
    assert plain.lambda_safe == 10 * lower.lambda_safe
    assert plain.eta == pytest.approx(10**0.5 * lower.eta, rel=1e-4)  # rates have six digits
    assert lower.lambda_base < lower.lambda_safe
    assert with_defaults({"lambda_safe": 0.03, "eta": 5.0}).eta == 5.0
    assert with_defaults({"data": "cifar10"}) == profiles.load("cpu").config("dp-ngd", "cifar10", 2.0, 0)
    assert with_defaults({"T": 2}).evals == 2


def test_threads_are_set(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    main(["--method", "dp-sgd", "--threads", "1", *FAST])
    assert seen[0] == 1  # the first: `record.rounding` sets threads of its own, once per process
    assert "seconds" in capsys.readouterr().out


def test_the_table_of_a_diverged_run_says_so():
    config, _ = parse(["--method", "dp-sgd", "--eta", "1e37", *FAST])
    text = summary(run(config))
    assert "diverged at step" in text
    assert "nan" not in text.splitlines()[1]


def test_the_table_shows_both_parts_of_a_split_budget_and_both_channels_of_gep():
    private, _ = parse(["--method", "dp-ngd-private-50", *FAST])
    text = summary(run(private))
    spent = []
    for purpose, releases in (("gradients", 3), ("curvature", 1)):
        (epsilon,) = re.findall(rf"{purpose}: epsilon ([\d.]+), sigma [\d.]+, {releases} releases", text)
        spent.append(float(epsilon))
    assert max(spent) < 2.0 < sum(spent)  # composed they spend 2; added up they would seem to spend more
    gep, _ = parse(["--method", "gep", "--public_size", "60", "--gep_directions", "9", *FAST])
    assert text.count("on sensitivity") == 1
    assert summary(run(gep)).count("on sensitivity") == 2
