"""The Triton kernels in Triton's interpreter, without a GPU: bit for bit what the plain forms compute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

CHECKS = {
    "routing": "from tests.kernels.routing_cases import *; check_fused('cpu', INTERPRETER_CASES)",
    "mul_sum": "from tests.kernels.mul_sum_cases import *; check_triton('cpu', INTERPRETER_CASES); check_far_rows()",
    "grouped": "from tests.kernels.grouped_cases import *; check_triton('cpu')",
    "convert": (
        "from tests.kernels.convert_cases import *; from moe_ep.kernels.marlin.compute import triton_convert_rows; "
        "check_convert('cpu', triton_convert_rows)"
    ),
    "pack_codes": "from tests.kernels.test_marlin_repack import *; check_triton('cpu')",
    "choices": "from tests.hf.test_choices import *; check_triton('cpu')",
    "align": "from tests.kernels.align_cases import *; check_batched('cpu')",
    "rotary": "from tests.kernels.rotary_cases import *; check_rotary('cpu', (torch.float32,))",
    "invariant products": "from tests.kernels.invariant_cases import *; check_linear('cpu', (torch.float32,))",
    "invariant attention": "from tests.kernels.invariant_cases import *; check_attention('cpu', (torch.float32,))",
    "dispatch": "from tests.dispatch.kernel_cases import *; check_all('cpu', INTERPRETER_CASES)",
}
# Triton reads the switch when it is imported, so this is another process; one for all, as importing takes seconds.
PROGRAM = """
import json, sys, traceback
failures = {}
for name, check in json.loads(sys.argv[1]).items():
    try:
        exec(check, {})
    except Exception:
        failures[name] = traceback.format_exc()
print(json.dumps(failures))
"""


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, json.dumps(CHECKS)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("check", CHECKS)
def test_same_bits_as_the_plain_form(check: str, failures: dict[str, str]) -> None:
    assert check not in failures, failures[check]
