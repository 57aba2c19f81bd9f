"""Who computes what among experts of few rows: the kernel's own code, compiled for the CPU, on random row counts."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from moe_ep.kernels.marlin.params import CUDA

COMPILER = shutil.which("c++") or shutil.which("g++")
SOURCES = Path(__file__).parent / "host"
RECIPROCAL = 'asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"((float)b));'
pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Headers beside each other; of the one of a GPU's instructions only its types."""
    folder = tmp_path_factory.mktemp("schedule")
    for name in ("decode_schedule.cuh", "threshold.cuh", "params.cuh"):
        shutil.copy(CUDA / name, folder)
    params = (folder / "params.cuh").read_text()
    assert params.count(RECIPROCAL) == 1
    (folder / "params.cuh").write_text(params.replace(RECIPROCAL, "inverse = reciprocal((float)b);"))
    types = re.findall("^typedef .*\n", (CUDA / "ptx.cuh").read_text(), re.MULTILINE)
    (folder / "ptx.cuh").write_text("#pragma once\n" + "".join(types))
    for source in SOURCES.iterdir():
        shutil.copy(source, folder)
    command = [str(COMPILER), "-std=c++17", "-O1", "few_rows.cpp", "-o", "few_rows"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "few_rows"


@pytest.mark.parametrize("seed", range(1, 5))
def test_every_row_is_computed_once(program: Path, seed: int) -> None:
    done = subprocess.run([program, str(seed), "100"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    numbers = [int(number) for number in re.findall(r"\d+", done.stdout)]
    assert len(numbers) == 5
    assert all(number > 0 for number in numbers), done.stdout
