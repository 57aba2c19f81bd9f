"""Both forms of a function: found by name, called with the same arguments, and the plain one on the CPU."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch

from moe_ep.kernels.forms import form_for

KERNELS = Path(__file__).parents[2] / "kernels"
USES = [
    (".".join(path.relative_to(KERNELS).with_suffix("").parts), plain, name)
    for path in sorted(KERNELS.rglob("*.py"))
    for plain, name in re.findall(r'form_for\((\w+), "([\w.]+)"', path.read_text())
]


@pytest.mark.parametrize(("module", "plain", "name"), USES)
def test_a_form_takes_the_arguments_of_the_other(module: str, plain: str, name: str) -> None:
    pytest.importorskip("triton")
    triton_module, function = name.rsplit(".", 1)
    forms = (
        getattr(importlib.import_module(f"moe_ep.kernels.{where}"), what)
        for where, what in ((module, plain), (triton_module, function))
    )
    first, second = (list(inspect.signature(form).parameters.values()) for form in forms)
    assert [p.annotation for p in first] == [p.annotation for p in second[: len(first)]]
    assert all(p.default is not p.empty for p in second[len(first) :]), "what one form alone takes needs a default"


def test_plain_on_the_cpu() -> None:
    assert form_for(torch.neg, "triton_quantize.triton_quantize_rows", torch.ones(1)) is torch.neg
    assert len(USES) >= 8
