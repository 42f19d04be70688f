"""The core and the policies import no torch and nothing of the project above them, and read no wall clock."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENGINE = sorted((ROOT / "research_engine" / "engine").glob("*.py"))
POLICIES = sorted((ROOT / "schedulers").glob("*.py"))


def imports(path: Path) -> set[str]:
    """Absolute names of the modules that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = ".".join(path.relative_to(ROOT).parts[:-1])
            parents = package.rsplit(".", node.level - 1)[0] if node.level else ""
            found.add(".".join(filter(None, (parents, node.module))))
    return found


def test_torch_is_not_imported_by_core_and_policies():
    """In a process of its own: import everything, serve a request, look at sys.modules."""
    modules = [f"research_engine.engine.{path.stem}" for path in ENGINE if path.stem != "__init__"]
    modules += [f"schedulers.{path.stem}" for path in POLICIES if path.stem != "__init__"]
    script = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "import schedulers\n"
        "from tests.engine.shadow import drain, greedy, make_engine\n"
        "for name in schedulers.registry.BUILT_IN:\n"
        "    engine = make_engine(schedulers.create(name)); engine.add_request('r', [1], greedy()); drain(engine)\n"
        "heavy = {'torch', 'numpy', 'transformers', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", ENGINE, ids=lambda path: path.stem)
def test_the_core_imports_nothing_of_the_project_but_itself(path):
    own = {name for name in imports(path) if name.split(".")[0] in ("research_engine", "schedulers", "experiments")}
    assert all(name.startswith("research_engine.engine") for name in own), own


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.stem)
def test_a_policy_imports_the_contract_alone(path):
    own = {name for name in imports(path) if name.split(".")[0] == "research_engine"}
    of_names = {"research_engine.plugins", "research_engine.engine.foreign"} if path.stem == "registry" else set()
    assert own <= {"research_engine.engine.contract"} | of_names, own


@pytest.mark.parametrize("path", ENGINE + POLICIES, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_no_wall_clock_is_read(path):
    """S28: time comes from the view; clock.py alone knows a real one."""
    clocks = imports(path) & {"time", "datetime", "timeit"}
    assert clocks == ({"time"} if path.name == "clock.py" else set())
