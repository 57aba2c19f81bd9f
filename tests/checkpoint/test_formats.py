"""Quantized forms against plain loops, bit for bit, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_ep.checkpoint.formats import GPTQConfig, pack_gptq, quantization_config
from moe_ep.checkpoint.formats.layout import pack_words, unpack_words
from moe_ep.errors import CheckpointError
from moe_ep.quantization.canonical_weights import CanonicalWeights, dequantize, quantize_int
from moe_ep.scalar_type import ScalarType, scalar_types
from tests.checkpoint.checkpoints import unpacked

TYPES = {
    (4, True): scalar_types.uint4b8,
    (4, False): scalar_types.uint4,
    (8, True): scalar_types.uint8b128,
    (8, False): scalar_types.uint8,
}


def naive_value(word: int, index: int, bits: int) -> int:
    return ((word & 0xFFFFFFFF) >> (bits * index)) & (2**bits - 1)


def naive_dequantize(qweight, qzeros, scales, g_idx, config: GPTQConfig) -> torch.Tensor:
    """The format's definition, one number at a time: f32 `[N, K]`."""
    pack = 32 // config.bits
    num_rows, num_columns = qweight.shape[1], qweight.shape[0] * pack
    values = torch.empty(num_rows, num_columns)
    for n in range(num_rows):
        for k in range(num_columns):
            group = int(g_idx[k])
            code = naive_value(int(qweight[k // pack, n]), k % pack, config.bits)
            zero = naive_value(int(qzeros[group, n // pack]), n % pack, config.bits)
            zero += 1 if config.checkpoint_format == "gptq" else 0
            values[n, k] = float(code - zero) * float(scales[group, n])
    return values


def random_words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape).to(torch.int32)


def random_zeros(groups: int, num_rows: int, config: GPTQConfig) -> torch.Tensor:
    """qzeros whose zero points are 1 or more, as checkpoint_format gptq can store them."""
    points = torch.randint(1, 2**config.bits, (groups, num_rows))
    stored = points - (1 if config.checkpoint_format == "gptq" else 0)
    pack = 32 // config.bits
    words = torch.zeros(groups, num_rows // pack, dtype=torch.int64)
    for index in range(pack):
        words |= stored[:, index::pack] << (config.bits * index)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("checkpoint_format", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("group_size", [16, 32, -1])
@pytest.mark.parametrize("act_order", [False, True])
def test_unpack_equals_the_naive_loop(bits: int, checkpoint_format: str, group_size: int, act_order: bool) -> None:
    torch.manual_seed(0)
    num_rows, num_columns = 16, 64
    config = GPTQConfig(bits=bits, group_size=group_size, desc_act=act_order, checkpoint_format=checkpoint_format)
    groups = config.num_groups(num_columns)
    qweight = random_words(num_columns * bits // 32, num_rows)
    qzeros = random_zeros(groups, num_rows, config)
    scales = torch.rand(groups, num_rows).half()
    g_idx = torch.arange(num_columns, dtype=torch.int32) // (num_columns // groups)
    if act_order:
        g_idx = g_idx[torch.randperm(num_columns)]
    weights = unpacked(config, qweight, qzeros, scales, g_idx)
    assert torch.equal(dequantize(weights), naive_dequantize(qweight, qzeros, scales, g_idx, config))
    assert weights.codes.shape == (num_rows, num_columns)
    assert weights.scales.shape == weights.zero_points.shape == (num_rows, groups)
    assert weights.quant_type_id == TYPES[bits, False].id
    assert (weights.g_idx is not None) == (act_order and groups > 1)
    packed = pack_gptq(weights, config)
    expected = (qweight, qzeros, scales, g_idx)
    assert all(torch.equal(found, stored) for found, stored in zip(packed, expected, strict=True))


def test_worked_example() -> None:
    config = GPTQConfig(bits=4, group_size=8)
    qweight = torch.tensor([[0x87654321 - 2**32] + 7 * [0]]).to(torch.int32)
    codes = unpacked(config, qweight, random_zeros(1, 8, config), torch.ones(1, 8), None).codes
    assert codes[0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert not codes[1:].any()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("checkpoint_format", ["gptq", "gptq_v2"])
def test_symmetric_zero_points_become_the_bias_of_the_type(bits: int, checkpoint_format: str) -> None:
    config = GPTQConfig(bits=bits, group_size=32, checkpoint_format=checkpoint_format)
    quantized = quantize_int(torch.randn(3, 16, 64), bits, 32)
    packed = pack_gptq(quantized, config)
    stored = {
        ("gptq", 4): 0x77777777,
        ("gptq_v2", 4): -0x77777778,
        ("gptq", 8): 0x7F7F7F7F,
        ("gptq_v2", 8): -0x7F7F7F80,
    }
    assert packed.qzeros.unique().tolist() == [stored[checkpoint_format, bits]]
    weights = unpacked(config, *packed)
    assert weights.zero_points is None and weights.g_idx is None
    assert weights.quant_type_id == quantized.quant_type_id == TYPES[bits, True].id
    assert torch.equal(weights.codes, quantized.codes) and torch.equal(weights.scales, quantized.scales)
    assert torch.equal(dequantize(weights), dequantize(quantized))


def test_leading_dimensions_are_a_batch() -> None:
    config = GPTQConfig(bits=4, group_size=16, desc_act=True)
    qweight, scales = random_words(2, 3, 8, 16), torch.rand(2, 3, 4, 16)
    qzeros = torch.stack([random_zeros(4, 16, config) for _ in range(6)]).view(2, 3, 4, 2)
    g_idx = torch.stack([torch.randperm(64) // 16 for _ in range(6)]).view(2, 3, 64).to(torch.int32)
    values = dequantize(unpacked(config, qweight, qzeros, scales, g_idx))
    for i in range(2):
        for j in range(3):
            one = unpacked(config, qweight[i, j], qzeros[i, j], scales[i, j], g_idx[i, j])
            assert torch.equal(values[i, j], dequantize(one))


@pytest.mark.parametrize("bits", [4, 8])
def test_words_may_have_gaps_between_them(bits: int) -> None:
    """As gate and up of a rank's only expert have, where a row is one word."""
    both = random_words(1, 4, 2)
    for half in both.chunk(2, dim=-1):
        codes = unpack_words(half, bits)
        assert torch.equal(codes, unpack_words(half.clone(memory_format=torch.contiguous_format), bits))
        assert torch.equal(pack_words(codes.repeat_interleave(2, 1)[:, ::2], bits), half)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 8])
def test_on_a_gpu_as_on_the_cpu(bits: int) -> None:
    config = GPTQConfig(bits=bits, group_size=16, desc_act=True)
    g_idx = (torch.randperm(64) // 16).to(torch.int32)
    tensors = (random_words(64 * bits // 32, 16), random_zeros(4, 16, config), torch.rand(4, 16).half(), g_idx)
    on_cpu = unpacked(config, *tensors)
    on_gpu = unpacked(config, *(tensor.cuda() for tensor in tensors))
    assert on_gpu.codes.is_cuda
    assert torch.equal(dequantize(on_gpu).cpu(), dequantize(on_cpu))
    assert all(
        torch.equal(found.cpu(), stored) for found, stored in zip(pack_gptq(on_gpu, config), tensors, strict=True)
    )


def test_a_shard_of_columns_keeps_the_scales_of_all_groups() -> None:
    config = GPTQConfig(bits=4, group_size=16, desc_act=True)
    qweight, qzeros, scales = random_words(8, 16), random_zeros(4, 16, config), torch.rand(4, 16)
    g_idx = (torch.randperm(64) // 16).to(torch.int32)
    whole = dequantize(unpacked(config, qweight, qzeros, scales, g_idx))
    half = unpacked(config, qweight[4:], qzeros, scales, g_idx[32:])
    assert torch.equal(dequantize(half), whole[:, 32:])


def test_last_group_may_be_short() -> None:
    config = GPTQConfig(bits=4, group_size=32)
    weights = CanonicalWeights(
        torch.randint(0, 16, (8, 40), dtype=torch.uint8), torch.rand(8, 2), scalar_types.uint4b8.id, 32
    )
    packed = pack_gptq(weights, config)
    expected = naive_dequantize(*packed, config)
    assert torch.equal(dequantize(unpacked(config, *packed)), expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_point_lost_by_the_first_format_is_refused(bits: int) -> None:
    config = GPTQConfig(bits=bits, group_size=-1)
    qzeros = torch.full((1, 16 * bits // 32), -1, dtype=torch.int32)
    with pytest.raises(CheckpointError, match=f"at most {2**bits - 2}, found {2**bits - 1}.*gptq_v2"):
        unpacked(config, random_words(4, 16), qzeros, torch.rand(1, 16), None)
    zero = CanonicalWeights(
        torch.zeros(16, 32, dtype=torch.uint8),
        torch.ones(16, 1),
        TYPES[bits, False].id,
        -1,
        zero_points=torch.zeros(16, 1, dtype=torch.uint8),
    )
    with pytest.raises(ValueError, match="zero_points hold a 0"):
        pack_gptq(zero, config)


@pytest.mark.parametrize(("low", "high"), [(0, 4), (-1, 3)])
def test_g_idx_outside_the_groups_is_refused(low: int, high: int) -> None:
    config = GPTQConfig(bits=4, group_size=16, desc_act=True)
    g_idx = torch.tensor([low, high] * 32, dtype=torch.int32)
    with pytest.raises(CheckpointError, match=f"groups 0 to 3, found {low} to {high}"):
        unpacked(config, random_words(8, 16), random_zeros(4, 16, config), torch.rand(4, 16), g_idx)


@pytest.mark.parametrize(
    ("settings", "sizes", "message"),
    [
        ({"quant_method": "gptq", "bits": 8, "group_size": 16}, (10, 32), "out_features is 10; GPTQ with 8 bits needs"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 16}, (16, 36), "in_features is 36; GPTQ with 4 bits needs"),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 16},
            (12, 32),
            "out_features is 12; AWQ needs a multiple of 8",
        ),
        ({"quant_method": "mxfp4"}, (8, 48), "in_features is 48; mxfp4 needs a multiple of 32"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            (8, 24),
            "in_features is 24; nvfp4 needs a multiple of 16",
        ),
    ],
)
def test_sizes_that_a_format_cannot_hold(settings: dict, sizes: tuple[int, int], message: str) -> None:
    scheme = quantization_config({"quantization_config": settings}).of_module("model.layers.0.mlp.experts.0.up_proj")
    with pytest.raises(ValueError, match=message):
        scheme.tensors(*sizes)


def naive_quantize(row: list[float], bits: int, group_size: int) -> tuple[list[int], list[float]]:
    codes, scales = [], []
    for start in range(0, len(row), group_size):
        group = row[start : start + group_size]
        scale = torch.tensor(max(abs(value) for value in group)).div(2 ** (bits - 1) - 0.5).item()
        scales.append(scale)
        for value in group:
            code = round(torch.tensor(value).div(scale).item()) if scale else 0
            codes.append(min(max(code + 2 ** (bits - 1), 0), 2**bits - 1))
    return codes, scales


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [8, 32])
def test_quantize_equals_the_naive_loop(bits: int, group_size: int) -> None:
    torch.manual_seed(1)
    weight = torch.randn(5, 32)
    weight[2, :group_size] = 0
    weights = quantize_int(weight, bits, group_size)
    for row in range(5):
        codes, scales = naive_quantize(weight[row].tolist(), bits, group_size)
        assert weights.codes[row].tolist() == codes
        assert weights.scales[row].tolist() == scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [16, -1])
def test_quantized_values_are_within_half_a_step(dtype: torch.dtype, bits: int, group_size: int) -> None:
    weight = torch.randn(2, 8, 64).to(dtype)
    weights = quantize_int(weight, bits, group_size)
    assert weights.scales.dtype == dtype
    steps = weights.scales.float().repeat_interleave(64 if group_size == -1 else group_size, dim=-1)
    # The scale itself is rounded to the dtype, which may push the largest value of a group past the last code.
    slack = 2 ** (bits - 1) * torch.finfo(dtype).eps
    assert ((dequantize(weights) - weight.float()).abs() <= steps * (0.5 + slack)).all()


def test_quantize_refuses() -> None:
    with pytest.raises(ValueError, match="bits is 3; it must be one of 4, 8"):
        quantize_int(torch.ones(4, 8), 3, 8)
    for group_size in (3, 0, -2):
        with pytest.raises(ValueError, match=f"group_size is {group_size}; it must be -1 or divide the 8"):
            quantize_int(torch.ones(4, 8), 4, group_size)


def test_dequantize_refuses_types_that_no_format_has() -> None:
    weights = quantize_int(torch.ones(4, 8), 4, 8)._replace(quant_type_id=ScalarType(5, 2, True).id)
    with pytest.raises(ValueError, match="must be an integer, e4m3 or e2m1 type"):
        dequantize(weights)


def test_config_of_a_plain_checkpoint_is_none() -> None:
    assert quantization_config({"model_type": "qwen3_moe"}) is None


@pytest.mark.parametrize("key", ["checkpoint_format", "format"])
def test_config_reads_what_writers_write(key: str) -> None:
    values = {
        "quant_method": "gptq",
        "bits": 8,
        "group_size": 128,
        "desc_act": True,
        "sym": False,
        key: "gptq_v2",
        "lm_head": False,
        "modules_in_block_to_quantize": [["mlp.experts"]],
    }
    expected = GPTQConfig(bits=8, group_size=128, desc_act=True, sym=False, checkpoint_format="gptq_v2")
    assert quantization_config({"quantization_config": values}) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "exl9"}, "quant_method is 'exl9'; it must be one of gptq"),
        ({"quant_method": None}, "quant_method is None; it must be one of gptq"),
        ({"bits": 3}, "bits is 3; it must be one of 4, 8"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; it must be one of gptq, gptq_v2"),
        ({"group_size": 0}, "group_size is 0; it must be -1"),
        ({"group_size": "x"}, "group_size is 'x'; it must be -1"),
        ({"desc_act": "false"}, "quantization_config: desc_act: expected true or false, found 'false'"),
        ({"sym": "true"}, "quantization_config: sym: expected true or false, found 'true'"),
        ({"sym": 0}, "quantization_config: sym: expected true or false, found 0"),
    ],
)
def test_config_refuses(changes: dict, message: str) -> None:
    values = {"quant_method": "gptq", "bits": 4, "group_size": 128} | changes
    with pytest.raises(CheckpointError, match=message):
        quantization_config({"quantization_config": values})


def test_flags_that_are_null_are_false() -> None:
    values = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    expected = GPTQConfig(bits=4, group_size=128, desc_act=False, sym=False)
    assert quantization_config({"quantization_config": values | {"desc_act": None, "sym": None}}) == expected
    assert quantization_config({"quantization_config": values}) == GPTQConfig(bits=4, group_size=128)


def test_config_names_a_missing_key() -> None:
    with pytest.raises(CheckpointError, match="expected bits, found"):
        quantization_config({"quantization_config": {"quant_method": "gptq", "group_size": 128}})
    with pytest.raises(CheckpointError, match="expected an object"):
        quantization_config({"quantization_config": "gptq"})


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float8_e4m3fn])
def test_what_has_no_scales_of_its_dtype_is_not_quantized(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"^weight is {dtype}"):
        quantize_int(torch.ones(2, 32).to(dtype), 4, 32)


@pytest.mark.parametrize("group_size", ["32", 32.0, None])
def test_a_group_has_a_whole_number_of_columns(group_size: Any) -> None:
    with pytest.raises(TypeError, match=f"^group_size is {group_size!r}"):
        quantize_int(torch.ones(2, 32), 4, group_size)
