"""Both forms of a function take the same arguments, the plain one runs on the CPU, and Triton may be missing."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moe_ep.registry import choose_form

ROOT = Path(__file__).parents[2]
USES = [
    (".".join(path.relative_to(ROOT).with_suffix("").parts), plain, kernel)
    for folder in ("kernels", "moe_ep/routing", "moe_ep/eplb", "moe_ep/hf")
    for path in sorted((ROOT / folder).rglob("*.py"))
    for plain, kernel in re.findall(r'choose_form\(\s*(\w+), "?([\w.:]+)"?,', path.read_text())
]
# Takes the arguments of the other as they come.
PASSED_ON = ("_map_plain",)


@pytest.mark.parametrize(("module", "plain", "kernel"), [use for use in USES if use[1] not in ("plain", *PASSED_ON)])
def test_a_form_takes_the_arguments_of_the_other(module: str, plain: str, kernel: str) -> None:
    module = module if module.startswith("moe_ep.") else f"moe_ep.{module}"
    where, _, what = f"moe_ep.kernels.{kernel}".rpartition(":") if ":" in kernel else (module, "", kernel)
    forms = getattr(importlib.import_module(module), plain), getattr(importlib.import_module(where), what)
    first, second = (list(inspect.signature(form).parameters.values()) for form in forms)
    assert [p.annotation for p in first] == [p.annotation for p in second[: len(first)]]
    assert all(p.default is not p.empty for p in second[len(first) :]), "what one form alone takes needs a default"


def test_plain_on_the_cpu() -> None:
    assert choose_form(torch.neg, torch.abs, torch.ones(1)) is torch.neg
    assert len(USES) >= 10


def test_kernels_import_and_compute_without_triton() -> None:
    program = """
import sys
sys.modules["triton"] = None
import torch
from moe_ep.kernels import align, choices, dispatch_messages, dispatch_rows, mul_sum, quantize, rotary, routing
from moe_ep.kernels.grouped import experts
from moe_ep.kernels.marlin import pack_marlin
print(mul_sum.moe_fused_mul_sum(torch.ones(1, 2, 4), torch.ones(1, 2)).sum().item())
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "8.0"
