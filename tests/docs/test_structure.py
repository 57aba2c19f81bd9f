"""The structure of the repository does not get worse: scripts/check_structure.py, and what it counts."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = ROOT / "scripts" / "check_structure.py"
    spec = importlib.util.spec_from_file_location("check_structure", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {
        "moe_ep/__init__.py": "from moe_ep.public import f\n__all__ = ['f']\n",
        "moe_ep/public.py": "from moe_ep.room.a import make_a\nf = make_a\n",
        "moe_ep/registry.py": "ENTRY = 'moe_ep.kernels.chosen:Chosen'\n",
        "moe_ep/room/__init__.py": "from moe_ep.room.a import make_a\nfrom moe_ep.room.b import B\n",
        "moe_ep/room/a.py": "from moe_ep.room import helper\nmake_a = helper.x\n",
        "moe_ep/room/b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from moe_ep.room import make_a\n",
        "moe_ep/room/helper.py": "def x():\n    from moe_ep.room.a import make_a\n    return make_a\n",
        "kernels/chosen.py": "from moe_ep.registry import ENTRY\n",
        "dispatch/lonely.py": "",
        "launch/cli/commands/run.py": "from moe_ep.dispatch import lonely\n",
        "README.md": "two words\n",
        "docs/page.md": "three more words\n",
        "scripts/structure.json": "{}",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_nothing_is_above_its_ceiling() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "check_structure.py")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr


def test_single_importers_leave_out_what_is_public_a_command_or_registered(tree: Path, script: ModuleType) -> None:
    found = script.single_importers(script.read_modules(tree))
    names = [line.split()[0] for line in found]
    assert names == ["moe_ep.dispatch.lonely", "moe_ep.room.b", "moe_ep.room.helper"]


def test_cycles_are_found_through_facades_type_checking_and_functions(tree: Path, script: ModuleType) -> None:
    modules = script.read_modules(tree)
    assert script.cycles(modules) == [["moe_ep.room", "moe_ep.room.b"]]
    (with_functions,) = (found for found in script.cycles(modules, with_functions=True) if "moe_ep.room.a" in found)
    assert "moe_ep.room.helper" in with_functions


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("recommend, amendment, needed, dearth, rollback, become homely", 0),
        ("it was mended; kIsDear, DEAR_ROWS, roll_call()", 4),
        ("until it comes\n# home", 1),
    ],
)
def test_replaced_words_in_any_form(tree: Path, script: ModuleType, text: str, count: int) -> None:
    (tree / "kernels" / "kernel.cuh").write_text(text)
    (tree / "tests").mkdir()
    (tree / "tests" / "test_it.py").write_text("mend")
    assert len(script.replaced_words(tree)) == count


def test_words_are_those_of_the_readme_and_the_pages(tree: Path, script: ModuleType) -> None:
    measured = script.measure(tree)
    assert measured["readme_words"][0] == 2 and measured["readme_and_docs_words"][0] == 5


def test_names_of_modules_that_are_assigned_twice(tree: Path, script: ModuleType) -> None:
    (tree / "kernels" / "chosen.py").write_text("SIZE = 1\nLEAST, MOST = 1, 2\ndef f():\n    MOST = 3\nSIZE = 2\n")
    assert script.assigned_twice(script.read_modules(tree)) == ["moe_ep.kernels.chosen: SIZE"]
