"""Quantized layers against layers that hold the dequantized weights, whole and as TP shards."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from moe_ep.checkpoint.formats.gptq import GPTQConfig, pack_gptq
from moe_ep.config import FusedMoEParallelConfig
from moe_ep.errors import BackendUnavailableError
from moe_ep.kernels.marlin import MarlinExperts
from moe_ep.layer import FusedMoE
from moe_ep.layer.methods import OnlineIntConfig, make_method, relative_error, tolerance
from moe_ep.layer.methods.canonical import CanonicalFusedMoEMethod
from moe_ep.modular_kernel.choice import PACKED
from moe_ep.quantization.canonical_weights import CanonicalWeights, dequantize, quantize_int
from moe_ep.scalar_type import scalar_types
from tests.layer.moe_oracle import Weights, load, make_inputs, make_weights, run_moe

E, K, N, TOP_K, T = 3, 64, 128, 2, 7
F32 = tolerance(torch.float32)
SYMMETRIC = {4: scalar_types.uint4b8, 8: scalar_types.uint8b128}
ASYMMETRIC = {4: scalar_types.uint4, 8: scalar_types.uint8}


def random_canonical(
    config: GPTQConfig, out_size: int, in_size: int, g_idx: torch.Tensor | None, seed: int
) -> CanonicalWeights:
    """Any codes, scales and zero points, so that a wrong group or zero point shows."""
    generator = torch.Generator().manual_seed(seed)
    groups = config.num_groups(in_size)
    codes = torch.randint(0, 2**config.bits, (out_size, in_size), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(out_size, groups, generator=generator) + 0.5) / 2 ** (config.bits - 1) / in_size**0.5
    zeros = torch.randint(1, 2**config.bits, (out_size, groups), generator=generator, dtype=torch.uint8)
    if config.sym:
        return CanonicalWeights(codes, scales, SYMMETRIC[config.bits].id, config.group_size, None, g_idx)
    return CanonicalWeights(codes, scales, ASYMMETRIC[config.bits].id, config.group_size, zeros, g_idx)


def scattered(config: GPTQConfig, in_size: int, seed: int) -> torch.Tensor | None:
    """An act-order g_idx."""
    if not config.desc_act:
        return None
    order = torch.randperm(in_size, generator=torch.Generator().manual_seed(seed))
    return (order // config.group_size).to(torch.int32)


@dataclass
class Checkpoint:
    """GPTQ tensors of E experts by name, and the weights that they stand for."""

    tensors: dict[str, torch.Tensor]
    plain: Weights


def make_checkpoint(config: GPTQConfig, has_bias: bool = False) -> Checkpoint:
    tensors: dict[str, torch.Tensor] = {}
    plain = make_weights(E, K, N, has_bias=has_bias)
    for expert in range(E):
        for number, projection in enumerate(("gate", "up", "down")):
            out_size, in_size = (K, N) if projection == "down" else (N, K)
            # gate and up of an expert share their g_idx.
            g_idx = scattered(config, in_size, seed=10 * expert + (projection == "down"))
            canonical = random_canonical(config, out_size, in_size, g_idx, seed=100 * expert + number)
            getattr(plain, projection)[expert] = dequantize(canonical)
            for name, tensor in pack_gptq(canonical, config)._asdict().items():
                tensors[f"experts.{expert}.{projection}_proj.{name}"] = tensor
            if has_bias:
                tensors[f"experts.{expert}.{projection}_proj.bias"] = plain.biases[projection][expert]
    return Checkpoint(tensors, plain)


def make_layer(quant_config: object, checkpoint: Checkpoint | None = None, **options: object) -> FusedMoE:
    mapping = FusedMoE.make_expert_params_mapping("gate_proj", "down_proj", "up_proj", E)
    settings: dict = {"num_experts": E, "top_k": TOP_K, "hidden_size": K, "intermediate_size": N}
    layer = FusedMoE(**(settings | {"quant_config": quant_config, "expert_mapping": mapping} | options))
    if checkpoint is not None:
        layer.load_weights(checkpoint.tensors.items())
    return layer


CONFIGS = {
    "4 bits": GPTQConfig(bits=4, group_size=32),
    "8 bits": GPTQConfig(bits=8, group_size=32),
    "zero points": GPTQConfig(bits=4, group_size=32, sym=False),
    "zero points of 8 bits, v2": GPTQConfig(bits=8, group_size=16, sym=False, checkpoint_format="gptq_v2"),
    "one group": GPTQConfig(bits=4, group_size=-1),
    "act-order": GPTQConfig(bits=4, group_size=32, desc_act=True),
    "act-order, zero points": GPTQConfig(bits=4, group_size=32, desc_act=True, sym=False),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_gptq_equals_the_dequantized_weights(name: str) -> None:
    config = CONFIGS[name]
    checkpoint = make_checkpoint(config, has_bias=name == "4 bits")
    layer = make_layer(config, checkpoint, has_bias=name == "4 bits")
    inputs = make_inputs(T, K, E)
    assert relative_error(layer(*inputs), run_moe(checkpoint.plain, *inputs, TOP_K)) < F32


def test_weights_are_processed_alike_under_autocast() -> None:
    """Which would join f16 scales in its own dtype, and refuses them on a CPU."""
    config = CONFIGS["4 bits"]
    checkpoint = make_checkpoint(config)
    plain, cast = (make_layer(config, checkpoint, params_dtype=torch.float16) for _ in range(2))
    plain.process_weights_after_loading()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast.process_weights_after_loading()
    for name, buffer in plain.named_buffers():
        assert torch.equal(cast.get_buffer(name), buffer) and cast.get_buffer(name).dtype is buffer.dtype


def test_gptq_parameters_have_the_shapes_on_disk() -> None:
    layer = make_layer(GPTQConfig(bits=4, group_size=32))
    assert {name: (tuple(p.shape), p.dtype) for name, p in layer.named_parameters()} == {
        "w13_qweight": ((E, K // 8, 2 * N), torch.int32),
        "w13_qzeros": ((E, K // 32, 2 * N // 8), torch.int32),
        "w13_scales": ((E, K // 32, 2 * N), torch.float32),
        "w13_g_idx": ((E, K), torch.int32),
        "w2_qweight": ((E, N // 8, K), torch.int32),
        "w2_qzeros": ((E, N // 32, K // 8), torch.int32),
        "w2_scales": ((E, N // 32, K), torch.float32),
        "w2_g_idx": ((E, N), torch.int32),
    }


def held_by_first_expert(layer: FusedMoE) -> list[torch.Tensor]:
    """The values of w13 and w2, as the experts are told them."""
    method = layer.quant_method
    quant, kwargs = method.get_fused_moe_quant_config(layer), method.expert_kwargs(layer)
    parts = zip(
        method.gemm_weights(layer),
        (quant.w1_scale, quant.w2_scale),
        (quant.w1_zp, quant.w2_zp),
        (kwargs["w13_g_idx"], kwargs["w2_g_idx"]),
        strict=True,
    )
    return [
        dequantize(
            CanonicalWeights(
                codes[0],
                scales[0],
                quant.quant_type_id,
                quant.group_size,
                *(None if tensor is None else tensor[0] for tensor in others),
            )
        )
        for codes, scales, *others in parts
    ]


@pytest.mark.parametrize(
    ("config", "N"),
    [
        (GPTQConfig(bits=4, group_size=32, sym=False), 128),
        (GPTQConfig(bits=4, group_size=-1), 128),
        (GPTQConfig(bits=4, group_size=128, sym=False), 128),
        (GPTQConfig(bits=4, group_size=64, sym=False), 192),
        (GPTQConfig(bits=4, group_size=32, desc_act=True), 128),
    ],
    ids=["whole groups", "one group", "one of 128", "the second of three on two ranks", "act-order"],
)
def test_gptq_shards_of_tensor_parallelism_add_up(config: GPTQConfig, N: int) -> None:
    K = 128
    biases = []
    for rank in range(2):
        parallel = FusedMoEParallelConfig.make(tp_size=2, ep_size=1, rank=rank)
        settings = {"num_experts": 1, "top_k": 1, "hidden_size": K, "intermediate_size": N, "has_bias": True}
        layer = FusedMoE(**settings, quant_config=config, parallel_config=parallel)
        projections = {}
        for number, (shard, projection) in enumerate((("w1", "gate"), ("w3", "up"), ("w2", "down"))):
            out_size, in_size = (K, N) if projection == "down" else (N, K)
            canonical = random_canonical(
                config, out_size, in_size, scattered(config, in_size, int(shard == "w2")), number
            )
            projections[projection] = dequantize(canonical)
            gemm = "w2" if shard == "w2" else "w13"
            for name, tensor in pack_gptq(canonical, config)._asdict().items():
                layer.weight_loader(layer.get_parameter(f"{gemm}_{name}"), tensor, name, shard, 0)
            layer.weight_loader(layer.get_parameter(f"{gemm}_bias"), torch.ones(out_size), "bias", shard, 0)
        layer.process_weights_after_loading()
        w13, w2 = held_by_first_expert(layer)
        half = slice(rank * N // 2, (rank + 1) * N // 2)
        assert torch.equal(w13, torch.cat([projections["gate"][half], projections["up"][half]]))
        assert torch.equal(w2, projections["down"][:, half])
        biases.append(layer.w2_bias[0])
    assert torch.equal(biases[0] + biases[1], torch.ones(K))


def test_processing_frees_what_was_loaded() -> None:
    config = CONFIGS["4 bits"]
    checkpoint = make_checkpoint(config)
    layer = make_layer(config, checkpoint)
    qweight = layer.w13_qweight
    layer.process_weights_after_loading()
    layer.process_weights_after_loading()
    assert dict(layer.named_parameters()) == {}
    with pytest.raises(RuntimeError, match="x: the parameters of .* were processed and freed already"):
        layer.weight_loader(qweight, torch.zeros(K // 8, N, dtype=torch.int32), "x", "w1", 0)


def test_a_half_loaded_gptq_layer_does_not_run() -> None:
    config = CONFIGS["4 bits"]
    checkpoint = make_checkpoint(config)
    del checkpoint.tensors["experts.1.up_proj.scales"]
    layer = make_layer(config, checkpoint)
    with pytest.raises(RuntimeError, match=r"not complete: w13_scales of local expert 1 \(shard w3\) were not loaded"):
        layer(*make_inputs(T, K, E))


def test_g_idx_may_be_left_out_where_it_says_nothing() -> None:
    config = CONFIGS["4 bits"]
    checkpoint = make_checkpoint(config)
    checkpoint.tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if "g_idx" not in name}
    inputs = make_inputs(T, K, E)
    assert relative_error(make_layer(config, checkpoint)(*inputs), run_moe(checkpoint.plain, *inputs, TOP_K)) < F32


def test_experts_are_chosen_when_the_weights_are_processed() -> None:
    config = GPTQConfig(bits=4, group_size=32)
    checkpoint = make_checkpoint(config)
    layer = make_layer(config, checkpoint)
    with pytest.raises(RuntimeError, match="not processed"):
        layer.quant_method.experts_names(layer)
    layer.process_weights_after_loading()
    assert set(layer.quant_method.experts_names(layer).values()) == {"reference", "batched_reference"}
    with pytest.raises(BackendUnavailableError, match=r"experts 'marlin' cannot compute this layer: .*on cpu"):
        make_layer(config, checkpoint, experts="marlin").process_weights_after_loading()
    with pytest.raises(BackendUnavailableError, match="these are plain"):
        make_layer(None, experts="marlin").modular_kernel  # noqa: B018


def test_packing_for_other_experts_leaves_nothing_of_the_layout_before(monkeypatch: pytest.MonkeyPatch) -> None:
    config = GPTQConfig(bits=4, group_size=32, desc_act=True, sym=False)
    layer = make_layer(config, make_checkpoint(config))
    layer.process_weights_after_loading()
    method = layer.quant_method
    assert isinstance(method, CanonicalFusedMoEMethod)
    canonical = method.canonical(layer, "w13"), method.canonical(layer, "w2")
    monkeypatch.setattr("moe_ep.layer.methods.canonical.choose_experts", lambda *_: PACKED)
    method.pack(layer, *canonical)  # as where the layer went to a GPU after its weights were processed
    packed = MarlinExperts.pack_weights(*canonical, layer.moe_config)
    for gemm, weights in zip(("w13", "w2"), packed, strict=True):
        held = {name for name, _ in layer.named_buffers(recurse=False) if name.startswith(gemm)}
        assert held == {f"{gemm}_processed_{name}" for name, value in weights._asdict().items() if value is not None}
    assert packed[0].g_idx is None
    assert canonical[0].g_idx is not None


@pytest.mark.parametrize("config", [*CONFIGS.values(), OnlineIntConfig()], ids=[*CONFIGS, "on load"])
def test_a_rank_without_experts_has_empty_weights(config: GPTQConfig | OnlineIntConfig) -> None:
    last_of_five = FusedMoEParallelConfig.make(ep_size=5, rank=4)
    layer = FusedMoE(E, TOP_K, K, N, params_dtype=torch.float32, quant_config=config, parallel_config=last_of_five)
    layer.process_weights_after_loading()
    w1, w2 = layer.quant_method.gemm_weights(layer)
    assert w1.shape == (0, 2 * N, K) and w2.shape == (0, K, N)


@pytest.mark.parametrize("name", ["act-order, zero points", "4 bits"])
def test_all_of_a_quantized_expert_can_be_moved(name: str) -> None:
    config = CONFIGS[name]
    checkpoint = make_checkpoint(config)
    layer = make_layer(config, checkpoint, enable_eplb=True)
    inputs = make_inputs(T, K, E)
    before = layer(*inputs)
    order = torch.tensor([2, 0, 1])
    tensors = layer.expert_weights()
    assert len(tensors) == (8 if name == "act-order, zero points" else 4)
    for tensor in tensors:
        tensor.copy_(tensor[order].clone())
    to_physical = torch.argsort(order).to(torch.int32).view(1, E, 1)
    layer.set_eplb_state(0, torch.zeros(1, E, dtype=torch.int32), to_physical, torch.ones(1, E, dtype=torch.int32))
    assert relative_error(layer(*inputs), before) < F32


def test_experts_that_happen_to_be_symmetric_move_like_those_that_are_not() -> None:
    symmetric = make_checkpoint(CONFIGS["4 bits"])
    layers = [make_layer(CONFIGS["zero points"], symmetric, enable_eplb=eplb) for eplb in (True, False)]
    assert [len(layer.expert_weights()) for layer in layers] == [6, 4]
    inputs = make_inputs(T, K, E)
    assert relative_error(layers[0](*inputs), layers[1](*inputs)) < F32


@pytest.mark.parametrize(
    ("config", "group_size"),
    [(OnlineIntConfig(), 64), (OnlineIntConfig(bits=8), 64), (OnlineIntConfig(group_size=32), 32)],
)
def test_quantize_on_load(config: OnlineIntConfig, group_size: int) -> None:
    weights = make_weights(E, K, N)
    layer = load(make_layer(config), weights)
    assert layer.quant_method.group_size == group_size
    for projection in ("gate", "up", "down"):
        for expert, weight in enumerate(getattr(weights, projection)):
            getattr(weights, projection)[expert] = dequantize(quantize_int(weight, config.bits, group_size))
    inputs = make_inputs(T, K, E)
    assert relative_error(layer(*inputs), run_moe(weights, *inputs, TOP_K)) < F32


@pytest.mark.parametrize("made_in", ["inference mode", "another"])
@pytest.mark.parametrize("quant_config", [None, OnlineIntConfig()], ids=["plain", "int4"])
def test_weights_are_loaded_again_in_another_mode_than_they_were_used_in(
    quant_config: OnlineIntConfig | None, made_in: str
) -> None:
    first, second = (make_weights(E, K, N, seed=seed) for seed in (0, 1))
    inputs = make_inputs(T, K, E)
    with torch.inference_mode(made_in == "inference mode"):
        layer = load(make_layer(quant_config), first)
    with torch.inference_mode():
        before = layer(*inputs).clone()
    layer.begin_reload()
    after = load(layer, second)(*inputs)
    assert torch.equal(after, load(make_layer(quant_config), second)(*inputs)) and not torch.equal(after, before)


def test_refuses_sizes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="in_features is 60"):
        make_layer(GPTQConfig(bits=4, group_size=-1), hidden_size=60)
    with pytest.raises(ValueError, match="48 and 128 input columns"):
        make_layer(OnlineIntConfig(), hidden_size=48)
    with pytest.raises(ValueError, match="bits is 3; it must be one of 4, 8"):
        OnlineIntConfig(bits=3)


def test_unknown_methods_are_refused_with_the_known_ones() -> None:
    class Config:
        quant_method = "magic"

    with pytest.raises(ValueError, match="quant_method is 'magic'"):
        make_method(make_layer(None).moe_config, Config())
    with pytest.raises(TypeError, match="quant_config is 'gptq'"):
        make_layer("gptq")
