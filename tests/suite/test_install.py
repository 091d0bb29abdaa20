"""What an installation holds: every package of the tree, and a path entry that nothing shadows."""

import subprocess
import sys
import tomllib

from dpngd.suite import paths


def test_the_wheel_holds_every_package():
    stated = tomllib.loads((paths.ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = (paths.ROOT / "dpngd").rglob("__init__.py")
    there = {".".join(path.parent.relative_to(paths.ROOT).parts) for path in found}
    assert there <= set(stated["packages"])
    for package in set(stated["packages"]) - there:  # folders of data
        folder = paths.ROOT / package.replace(".", "/").replace("dpngd/params", "params")
        assert list(folder.glob("*")), package
        assert package in stated["package-data"]


def test_a_script_beside_a_clone_imports_the_package(tmp_path):
    """~/x/dpngd is a clone and ~/x/my.py is run: the folder of the clone must not pass for the package."""
    (tmp_path / "dpngd" / "dpngd").mkdir(parents=True)
    script = tmp_path / "my.py"
    script.write_text("import dpngd; print(dpngd.__version__)")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
