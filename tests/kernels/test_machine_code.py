"""Digests of machine code are equal where names, comments and order differ, and not where instructions do."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from moe_ep.kernels import jit

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
import compare_machine_code as script

pytest.importorskip("cuda.core", reason="cuda-core is not installed")
pytest.importorskip("cuda.bindings.nvrtc", reason="the bindings of NVRTC are not installed")


def kernel(name: str = "doubled", entry: str = "entry", factor: int = 2, size: int = 32, offset: int = 3) -> str:
    return f"""
        __device__ int {name}(int x) {{ return {factor} * x; }}
        __constant__ int of_{name} = {offset};
        extern "C" __global__ void {entry}(int* out) {{
          __shared__ int numbers[{size}];
          numbers[threadIdx.x] = out[threadIdx.x];
          __syncthreads();
          out[threadIdx.x] = {name}(numbers[31 - threadIdx.x]) + of_{name};
        }}"""


def digest(tmp_path: Path, text: str, entry: str = "entry") -> dict[str, str]:
    path = tmp_path / "kernel.cu"
    path.write_text(text)
    return script.digest(jit.KernelSource(path, entry, (("UNUSED", "1"),)), "sm_90a")


def test_names_and_comments_do_not_matter(tmp_path: Path) -> None:
    first = digest(tmp_path, kernel())
    assert digest(tmp_path, "// twice\n" + kernel(name="twice")) == first
    assert digest(tmp_path, kernel(entry="other"), "other") == first


@pytest.mark.parametrize("other", [{"factor": 3}, {"size": 64}, {"offset": 4}], ids=str)
def test_instructions_shared_memory_and_constants_do(tmp_path: Path, other: dict[str, int]) -> None:
    assert digest(tmp_path, kernel(**other)) != digest(tmp_path, kernel())


def test_files_are_compared_by_builds_that_both_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, same, other = (tmp_path / f"{name}.json" for name in ("before", "same", "other"))
    before.write_text(json.dumps({"a": {".text": "1"}, "b": {".text": "2"}}))
    same.write_text(json.dumps({"a": {".text": "1"}, "c": {".text": "3"}}))
    other.write_text(json.dumps({"a": {".text": "1"}, "b": {".text": "4"}}))
    assert script.compare(before, same)
    assert not script.compare(before, other)
    assert "b: .text (2 -> 4)" in capsys.readouterr().out


def test_every_build_has_a_name_of_its_own() -> None:
    builds = list(script.builds())
    assert len({(name, arch) for name, _, arch, _ in builds}) == len(builds)
    assert {source.path.name for _, source, _, quick in builds if quick} == {
        source.path.name for _, source, *_ in builds
    }
