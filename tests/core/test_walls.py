"""The wall between the optimizer and the suite: what the modules at the top of dpngd/ may import."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dpngd

PACKAGE = Path(dpngd.__file__).parent
TOP = sorted(PACKAGE.glob("*.py"))
CORE = [*TOP, *sorted((PACKAGE / "layers").glob("*.py")), *sorted((PACKAGE / "audit").glob("*.py"))]
LATE = {"audit/figure.py": {"matplotlib"}, "images.py": {"sklearn"}, "progress.py": {"tqdm"}}
# imported when asked for; where they are absent there is an error that names them, or a plainer way (progress)
ALLOWED = {"torch", "opacus", "numpy", "scipy", "threadpoolctl", "dpngd", *sys.stdlib_module_names}
OUTSIDE = {"training", "data", "suite"}


def imports(path):
    """(module, whether it is imported when the file is) of every import in a file."""
    tree = ast.parse(path.read_text())
    late = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) not in late) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: imports are absolute here"
            if node.module == "dpngd":  # `from dpngd import x`: x may be a room
                yield from ((f"dpngd.{alias.name}", id(node) not in late) for alias in node.names)
            yield node.module, id(node) not in late


def test_there_are_few_modules_at_the_top():
    assert len(TOP) <= 20


@pytest.mark.parametrize("path", CORE, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_the_core_imports_only_what_it_may(path):
    late = LATE.get(str(path.relative_to(PACKAGE)), set())
    for module, at_import in imports(path):
        package = module.partition(".")[0]
        assert package in ALLOWED or (package in late and not at_import), f"{path.name} imports {module}"
        room = module.split(".")[1] if module.startswith("dpngd.") else ""
        if path.name != "__main__.py":  # the command line calls every room, late
            assert room not in OUTSIDE, f"{path.name} imports {module}"


def test_the_command_line_imports_rooms_late():
    for module, at_import in imports(PACKAGE / "__main__.py"):
        if at_import:
            assert module.partition(".")[0] in {"dpngd", *sys.stdlib_module_names}
            assert not any(module.startswith(f"dpngd.{room}") for room in OUTSIDE)


@pytest.mark.parametrize("room", ["training", "data"])
def test_training_and_data_do_not_import_the_suite(room):
    for path in (PACKAGE / room).rglob("*.py"):
        for module, at_import in imports(path):
            if path.name == "command.py" and not at_import:
                continue  # a command line takes its defaults from a profile, late
            assert not module.startswith("dpngd.suite"), f"{path.relative_to(PACKAGE)} imports {module}"


@pytest.mark.parametrize("statement", [
    "import dpngd", "from dpngd import UsageError, DynamicFloor, lambda_safe, eta_ngd", "import dpngd.methods",
    "import dpngd.audit.command", "from dpngd.training.config import RunConfig"])
def test_names_and_configs_need_no_torch(statement):
    code = f"{statement}\nimport sys\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_public_names_are_there():
    for name in dpngd.__all__:
        assert getattr(dpngd, name) is not None
    assert set(dpngd.__all__) <= set(dir(dpngd))
    with pytest.raises(AttributeError, match="no attribute 'DPNDG'"):
        _ = dpngd.DPNDG


def test_no_two_things_have_one_name():
    """No class twice in the package, and no function or class whose name says another thing in another module.

    Functions that do the same for another module (build, register, main) share a name on purpose; constants may.
    """
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) or (
                    isinstance(node, ast.FunctionDef) and node.name in {"plan", "published", "timed"}):
                found.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert {name: where for name, where in found.items() if len(where) > 1} == {}
    assert {"plan", "published", "timed"} <= set(found)
