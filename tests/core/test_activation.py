"""Activations against scalar formulas."""

import math

import pytest
import torch

from moe_ep.activation import MoEActivation, apply_activation, gate_limit


def silu(x):
    return x / (1 + math.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))


def gelu_tanh(x):
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def swigluoai(gate, up):
    gate, up = min(gate, 7.0), max(-7.0, min(up, 7.0))
    return (up + 1) * gate / (1 + math.exp(-1.702 * gate))


def swiglustep(gate, up, limit=7.0):
    return min(silu(gate), limit) * max(-limit, min(up, limit))


def situ(gate, up):
    return 4 * math.tanh(gate / 4) / (1 + math.exp(-gate)) * 25 * math.tanh(up / 25)


GATED = {
    "silu": lambda g, u: silu(g) * u,
    "gelu": lambda g, u: gelu(g) * u,
    "gelu_tanh": lambda g, u: gelu_tanh(g) * u,
    "swigluoai": swigluoai,
    "swiglustep": swiglustep,
    "situ": situ,
}
UNGATED = {"silu_no_mul": silu, "gelu_no_mul": gelu, "relu2_no_mul": lambda x: max(x, 0.0) ** 2}


def test_every_activation_is_covered():
    assert {*GATED, *UNGATED} == {member.value for member in MoEActivation}


@pytest.mark.parametrize("name", GATED)
def test_gated(name):
    x = torch.randn(3, 10) * 6
    got = apply_activation(name, x)
    for row, out in zip(x.tolist(), got.tolist(), strict=True):
        expected = [GATED[name](g, u) for g, u in zip(row[:5], row[5:], strict=True)]
        assert out == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", UNGATED)
def test_ungated(name):
    x = torch.randn(2, 7) * 3
    got = apply_activation(MoEActivation(name), x)
    for row, out in zip(x.tolist(), got.tolist(), strict=True):
        assert out == pytest.approx([UNGATED[name](v) for v in row], rel=1e-5, abs=1e-6)


def test_writes_in_place_and_rounds_once():
    x = torch.randn(4, 8, dtype=torch.bfloat16)
    output = torch.full((4, 4), float("nan"), dtype=torch.bfloat16)
    assert apply_activation("silu", x, output) is output
    assert torch.equal(output, apply_activation("silu", x.float()).bfloat16())


@pytest.mark.parametrize("name", [name for name in GATED if name not in ("swiglustep", "situ")])
def test_gate_and_up_end_at_a_limit(name):
    x = torch.randn(3, 10) * 6
    got = apply_activation(name, x, clamp_limit=2.5)
    for row, out in zip(x.tolist(), got.tolist(), strict=True):
        ends = [(min(g, 2.5), max(-2.5, min(u, 2.5))) for g, u in zip(row[:5], row[5:], strict=True)]
        assert out == pytest.approx([GATED[name](g, u) for g, u in ends], rel=1e-5, abs=1e-6)


def test_the_gate_of_swiglustep_ends_behind_silu():
    x = torch.randn(3, 10) * 6
    got = apply_activation("swiglustep", x, clamp_limit=2.5)
    for row, out in zip(x.tolist(), got.tolist(), strict=True):
        expected = [swiglustep(g, u, 2.5) for g, u in zip(row[:5], row[5:], strict=True)]
        assert out == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_a_limit_of_its_own_or_one_that_is_given():
    assert gate_limit("swigluoai") == 7.0
    assert gate_limit("swigluoai", 9) == 9.0
    assert gate_limit("swiglustep") == 7.0
    assert gate_limit("silu") is None
    assert gate_limit("silu", 10) == 10.0


@pytest.mark.parametrize("limit", [0, -1.0, math.inf, math.nan, True, "10"])
def test_refuses_limits_that_cannot_be(limit):
    with pytest.raises(ValueError, match=r"clamp_limit \(swiglu_limit\) is"):
        gate_limit("silu", limit)


def test_refuses():
    with pytest.raises(ValueError, match="clamp_limit .* is 7.0 and gelu_no_mul has no gate"):
        apply_activation("gelu_no_mul", torch.zeros(1, 2), clamp_limit=7.0)
    with pytest.raises(ValueError, match="clamp_limit .* is 7.0 and situ"):
        apply_activation("situ", torch.zeros(1, 2), clamp_limit=7.0)
    with pytest.raises(ValueError, match="activation is 'swish'"):
        apply_activation("swish", torch.zeros(1, 2))
    with pytest.raises(ValueError, match="3 columns"):
        apply_activation("silu", torch.zeros(1, 3))
    with pytest.raises(ValueError, match="output has shape"):
        apply_activation("silu", torch.zeros(1, 4), torch.zeros(1, 4))
    for input, held in (
        (torch.ones(1, 4, dtype=torch.int32), r"torch.int32 \(1, 4\)"),
        (torch.tensor(1.0), r"torch.float32 \(\)"),
        (None, "a NoneType"),
    ):
        with pytest.raises(ValueError, match=f"input is {held}; it must be a tensor of a float dtype"):
            apply_activation("silu", input)
