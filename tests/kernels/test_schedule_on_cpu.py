"""The decode kernel's schedule: its own code, compiled for the CPU, on random row counts."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from moe_ep.kernels import jit
from moe_ep.kernels.marlin.params import CUDA

COMPILER = shutil.which("c++") or shutil.which("g++")
SOURCES = Path(__file__).parent / "host"
RECIPROCAL = 'asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"((float)b));'
pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernel's section of that name and the headers it needs; of a GPU's instructions only the names of types."""
    folder = tmp_path_factory.mktemp("schedule")
    for name in ("select_kernel.cuh", "params.cuh"):
        shutil.copy(CUDA / name, folder)
    kernel = (CUDA / "decode_sm90.cu").read_text()
    section = kernel[kernel.index("// ==== Schedule ====") : kernel.index("// ==== Raw codes ====")]
    (folder / "schedule.cuh").write_text(f'#pragma once\n#include "select_kernel.cuh"\n{section}')
    params = (folder / "params.cuh").read_text()
    assert params.count(RECIPROCAL) == 1
    (folder / "params.cuh").write_text(params.replace(RECIPROCAL, "inverse = reciprocal((float)b);"))
    ptx = Path(jit.__file__).parent / "cuda" / "ptx.cuh"
    types = re.findall("^typedef .*\n", ptx.read_text(), re.MULTILINE)
    (folder / "ptx.cuh").write_text("#pragma once\n" + "".join(types))
    for source in SOURCES.iterdir():
        shutil.copy(source, folder)
    for name, defines in (("decode_schedule", []), ("invariant_schedule", ["-DBATCH_INVARIANT=1"])):
        types = ["-DWEIGHT_TYPE=1", "-DFLOAT8_E4M3=3"]
        command = [str(COMPILER), "-std=c++17", "-O1", *types, *defines, "decode_schedule.cpp", "-o", name]
        subprocess.run(command, cwd=folder, check=True)
    return folder / "decode_schedule"


@pytest.mark.parametrize("seed", range(1, 3))
def test_every_row_is_computed_once(program: Path, seed: int) -> None:
    done = subprocess.run([program, str(seed), "100"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    numbers = [int(number) for number in re.findall(r"\d+", done.stdout)]
    assert len(numbers) == 5
    assert all(number > 0 for number in numbers), done.stdout


def test_tiles_of_a_batch_invariant_build_are_whole(program: Path) -> None:
    done = subprocess.run([program.with_name("invariant_schedule"), "1", "100"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    both, forced, alone, _, several = (int(number) for number in re.findall(r"\d+", done.stdout))
    assert (both, forced) == (0, 0) and alone == 100 and several > 0
