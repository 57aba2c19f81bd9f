"""transformers models with sharded experts against the same models whole, on real ranks with requests of their own."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")


import moe_ep
import moe_ep.hf.parallelize  # registers moe_ep with transformers
from moe_ep.activation import MoEActivation
from moe_ep.checkpoint import CheckpointReader
from moe_ep.checkpoint.formats import GPTQConfig, pack_gptq
from moe_ep.checkpoint.writer import write_checkpoint
from moe_ep.eplb.config import EplbConfig
from moe_ep.errors import DispatchTimeoutError
from moe_ep.hf.experts import experts_shape, find_experts
from moe_ep.hf.parallelized import steps_of
from moe_ep.hf.steps import Step, StepCoordinator
from moe_ep.layer.methods import relative_error, tolerance
from moe_ep.quantization.canonical_weights import dequantize, quantize_int
from tests.generation.alone import load_alone
from tests.hf.hf_models import FAMILIES, SIZES, make_model
from tests.ranks import RankPool, ranks

SOME = ["Qwen3Moe", "DeepseekV3", "GptOss"]
# Names that configurations have for it.
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# (prompts, prompt length, steps of decoding) of each request, by rank: the last rank has none.
REQUESTS: tuple[tuple[tuple[int, int, int], ...], ...] = (((2, 11, 3), (1, 3, 0)), ((1, 5, 7), (3, 9, 2)), ())


def check_requests(rank: int, parallel: Any, alone: Any) -> None:
    """Prefill and cached decoding of this rank's requests against the whole model in f32.

    The parallelized model may be off by what the whole one in its dtype is, and by what each layer may add.
    """
    dtype = next(alone.parameters()).dtype
    models = (parallel, alone) if dtype == torch.float32 else (parallel, alone, copy.deepcopy(alone).float())
    allowed = len(steps_of(parallel).layers) * tolerance(dtype)
    with torch.inference_mode(), moe_ep.serving(parallel):
        for number, (batch, length, num_steps) in enumerate(REQUESTS[rank]):
            torch.manual_seed(100 * rank + number)
            tokens = torch.randint(1, SIZES["vocab_size"], (batch, length))
            caches: list[Any] = [None] * len(models)
            logits: list[list[torch.Tensor]] = [[] for _ in models]
            for _ in range(num_steps + 1):
                for index, model in enumerate(models):
                    output = model(tokens, past_key_values=caches[index], use_cache=True)
                    caches[index] = output.past_key_values
                    logits[index].append(output.logits)
                tokens = logits[-1][-1][:, -1:].argmax(-1)
            # Of all passes together: a single token's logits may be small, and its error in bf16 of any size.
            got, rounded, *exact = (torch.cat(passes, dim=1) for passes in logits)
            unavoidable = relative_error(rounded, exact[0]) if exact else 0.0
            error = relative_error(got, exact[0] if exact else rounded)
            assert error < unavoidable + allowed, f"{error:.2e} and alone {unavoidable:.2e}, request {number}"


def from_model(rank: int, world_size: int, family: str, options: dict[str, Any]) -> list[int]:
    alone = make_model(family)
    parallel = moe_ep.parallelize(copy.deepcopy(alone), **options)
    check_requests(rank, parallel, alone)
    return [layer.moe_config.num_local_experts for layer in steps_of(parallel).layers]


@pytest.mark.parametrize("family", SOME)
def test_ranks_with_requests_of_their_own(family: str) -> None:
    """From a model; every family is in test_from_a_checkpoint in f32."""
    held = ranks(3).run(from_model, family, {})
    num_experts = [module.num_experts for _, module in find_experts(make_model(family))]
    assert [sum(layer) for layer in zip(*held, strict=True)] == num_experts
    assert max(map(max, held)) < min(num_experts)


def in_int4(model: Any) -> Any:
    """The model with its experts quantized to int4 and back."""
    for _, experts in find_experts(model):
        group_size = math.gcd(128, *experts.down_proj.shape[1:])
        for param in (param for param in experts.parameters() if param.dim() == 3):
            rows = param.data.mT if experts.is_transposed else param.data
            rows = dequantize(quantize_int(rows.contiguous(), 4, group_size)).to(param.dtype)
            param.data = rows.mT.contiguous() if experts.is_transposed else rows
    return model


def in_bf16(rank: int, world_size: int, family: str) -> None:
    # Tokens take every expert: where they take some, rounding may turn a choice, and the outputs have little in common.
    num_experts = next(FAMILIES[family][key] for key in NUM_EXPERTS if key in FAMILIES[family])
    changes = {"num_experts_per_tok": num_experts}
    if "n_group" in FAMILIES[family]:
        changes |= {"n_group": 1, "topk_group": 1}
    for quantize in ("none", "int4"):
        made = make_model(family, torch.bfloat16, **changes)
        alone = copy.deepcopy(made)
        parallel = moe_ep.parallelize(made, quantize=quantize)
        check_requests(rank, parallel, in_int4(alone) if quantize == "int4" else alone)


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[] if family in SOME else pytest.mark.thorough) for family in FAMILIES]
)
def test_bf16_and_int4(family: str) -> None:
    ranks(3).run(in_bf16, family)


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "batched_all_to_all", "max_num_tokens": 4},
        {"backend": "allgather_reducescatter"},
        {"backend": "all_to_all", "decode_max_num_tokens": 3},
        {"num_redundant_experts": 5, "eplb": EplbConfig(window_size=4, first_plan=2, interval=4, asynchronous=False)},
    ],
    ids=lambda options: "-".join(map(str, options)),
)
def test_backends_and_balancing(options: dict[str, Any]) -> None:
    ranks(3).run(from_model, "Qwen3Moe", options)


class SizesInMemory(TorchDispatchMode):
    """The sizes, in any order, of the tensors with memory that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not result.is_meta:
            self.seen.add(tuple(sorted(result.shape)))
        return result


def from_path(rank: int, world_size: int, folder: str, family: str, quantize: str) -> int:
    alone = make_model(family, hidden_size=64)
    with SizesInMemory() as sizes:
        parallel = moe_ep.parallelize(folder, dtype=torch.float32, quantize=quantize)
    # At no time does a rank hold a matrix of all experts.
    whole = {tuple(sorted(param.shape)) for _, experts in find_experts(alone) for param in experts.parameters()}
    assert sizes.seen and sizes.seen.isdisjoint(size for size in whole if len(size) == 3)
    check_requests(rank, parallel, in_int4(alone) if quantize == "int4" else alone)
    return steps_of(parallel).layers[0].moe_config.num_local_experts


@pytest.mark.parametrize("family", FAMILIES)
def test_from_a_checkpoint(family: str, tmp_path: Path) -> None:
    make_model(family).save_pretrained(tmp_path, max_shard_size="100KB")
    held = ranks(3).run(from_path, str(tmp_path), family, "none")
    assert sum(held) == next(module for _, module in find_experts(make_model(family))).num_experts


def test_quantized_on_load(tmp_path: Path) -> None:
    make_model("Qwen3Moe").save_pretrained(tmp_path)
    ranks(3).run(from_path, str(tmp_path), "Qwen3Moe", "int4")


def test_rows_of_8_bits() -> None:
    ids = torch.arange(12).view(1, -1)
    outputs = []
    for input_dtype in (None, "none", torch.int8):
        model = moe_ep.parallelize(make_model("Qwen3Moe"), quantize="int4", input_dtype=input_dtype)
        rounded = torch.int8 if input_dtype == torch.int8 else None
        assert all(layer.rounds_rows_to == rounded for layer in steps_of(model).layers)
        outputs.append(model(ids).logits)
    assert torch.equal(outputs[0], outputs[1])
    assert 0 < relative_error(outputs[2], outputs[0]) < 0.05
    with pytest.raises(ValueError, match="torch.int8 and weights are plain"):
        moe_ep.parallelize(make_model("Qwen3Moe"), input_dtype=torch.int8)


def gptq(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    config = GPTQConfig(bits=4, group_size=32)
    return pack_gptq(quantize_int(weight.half(), 4, 32), config)._asdict()


def fp8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """One block: both sizes are below 128."""
    scale = weight.abs().max() / 448
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale_inv": scale.float().view(1, 1)}


WRITERS: dict[str, tuple[Callable[[torch.Tensor], dict[str, torch.Tensor]], dict[str, Any]]] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32}),
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
}


def write_quantized(folder: Path, method: str) -> None:
    """A model whose every projection is quantized, attention as well as experts."""
    writer, quantization = WRITERS[method]
    make_model("Qwen3Moe").save_pretrained(folder / "plain")
    with CheckpointReader(folder / "plain") as reader:
        tensors = {}
        for name in reader.names():
            tensor = reader.read(name)
            stem = name.removesuffix("weight")
            quantized = writer(tensor) if name.endswith("_proj.weight") else {name.removeprefix(stem): tensor}
            tensors |= {stem + suffix: value for suffix, value in quantized.items()}
        write_checkpoint(folder, reader.config | {"quantization_config": quantization}, tensors.items())


def quantized_attention(rank: int, world_size: int, folder: str) -> None:
    check_requests(rank, moe_ep.parallelize(folder, dtype=torch.float32), load_alone(Path(folder)))


@pytest.mark.parametrize("method", WRITERS)
def test_attention_that_is_quantized_on_disk(method: str, tmp_path: Path) -> None:
    write_quantized(tmp_path, method)
    ranks(3).run(quantized_attention, str(tmp_path))


def lockstep(rank: int, world_size: int) -> list[int]:
    alone = make_model("Qwen3Moe")
    model = copy.deepcopy(alone)
    model.set_experts_implementation("moe_ep")
    torch.manual_seed(rank)
    for length in (4, 9 - rank):
        tokens = torch.randint(1, SIZES["vocab_size"], (rank + 1, length))
        with torch.inference_mode():
            assert relative_error(model(tokens).logits, alone(tokens).logits) < tolerance(torch.float32)
    return [sum(param.numel() for param in module.parameters()) for _, module in find_experts(model)]


def test_as_an_experts_implementation() -> None:
    held = ranks(3).run(lockstep)
    whole = [sum(param.numel() for param in module.parameters()) for _, module in find_experts(make_model("Qwen3Moe"))]
    assert [sum(layer) for layer in zip(*held, strict=True)] == whole


@pytest.mark.parametrize("passes_before", [0, 1])
def test_a_compiled_model_has_a_node_for_each_layer(passes_before: int) -> None:
    """Once a pass has sharded the experts the whole model is one graph."""
    model, graphs = make_model("Qwen3Moe"), []
    expected = model(tokens := torch.arange(1, 9).view(2, 4)).logits
    model.set_experts_implementation("moe_ep")

    def keep(graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph

    with torch.inference_mode():
        for _ in range(passes_before):
            model(tokens)
        got = torch.compile(model, fullgraph=passes_before > 0, backend=keep)(tokens).logits
    assert relative_error(got, expected) < tolerance(torch.float32)
    nodes = [sum("moe_forward_routed" in str(node.target) for node in graph.graph.nodes) for graph in graphs]
    assert sum(nodes) == len(list(find_experts(model)))
    assert passes_before == 0 or len(nodes) == 1


def generates(rank: int, world_size: int) -> None:
    alone = make_model("Mixtral")
    parallel = moe_ep.parallelize(copy.deepcopy(alone))
    torch.manual_seed(rank)
    tokens = torch.randint(1, SIZES["vocab_size"], (2, 6))
    settings = {"max_new_tokens": 3 + 5 * rank, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
    with moe_ep.serving(parallel):
        continued = parallel.generate(tokens, **settings)
    assert torch.equal(continued, alone.generate(tokens, **settings))
    # All ranks have come to the end of the block: whoever is early in the next one waits for no one behind it.
    assert steps_of(parallel).serve() == 0


def test_generate_of_transformers() -> None:
    ranks(3).run(generates)


def in_threads(rank: int, world_size: int) -> int:
    alone = make_model("Qwen3Moe")
    parallel = moe_ep.parallelize(copy.deepcopy(alone), decode_max_num_tokens=4)
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    prompts = [torch.randint(1, SIZES["vocab_size"], (1, length)) for length in ((3, 9, 5), (7,), ())[rank]]
    with moe_ep.serving(parallel), ThreadPoolExecutor(3) as threads:
        continued = list(threads.map(lambda prompt: parallel.generate(prompt, **settings), prompts))
    assert all(map(torch.equal, continued, (alone.generate(prompt, **settings) for prompt in prompts)))
    return len(continued)


def test_threads_of_a_rank_take_turns() -> None:
    assert ranks(3).run(in_threads) == [3, 1, 0]


def test_a_model_that_is_cast_keeps_its_experts_dtype() -> None:
    alone = make_model("Qwen3Moe")
    parallel = moe_ep.parallelize(copy.deepcopy(alone)).to(torch.bfloat16)
    tokens = torch.ones(2, 3, dtype=torch.int64)
    with torch.inference_mode():
        logits, rounded = parallel(tokens).logits, copy.deepcopy(alone).to(torch.bfloat16)(tokens).logits
        exact = alone(tokens).logits
    assert logits.dtype == torch.bfloat16
    assert relative_error(logits, exact) < relative_error(rounded, exact) + tolerance(torch.bfloat16)


@pytest.mark.parametrize(
    ("approximate", "activation"), [("none", MoEActivation.GELU), ("tanh", MoEActivation.GELU_TANH)]
)
def test_both_forms_of_torchs_gelu(approximate: str, activation: MoEActivation) -> None:
    model = make_model("Qwen3Moe")
    for name, module in find_experts(model):
        module.act_fn = torch.nn.GELU(approximate=approximate)
        assert experts_shape(name, module).activation is activation


def test_a_pass_that_fails_leaves_no_step_behind() -> None:
    model = moe_ep.parallelize(make_model("Qwen3Moe"))
    steps, seen = steps_of(model), []
    steps.layers[0].register_forward_pre_hook(lambda layer, args: seen.append(steps.current))
    with torch.inference_mode():
        with pytest.raises(IndexError):
            model(torch.full((1, 1), SIZES["vocab_size"]))
        assert steps.current is None
        with ThreadPoolExecutor(1) as other:
            other.submit(model, torch.ones(2, 3, dtype=torch.int64)).result()
    assert [step.num_tokens for step in seen] == [(6,)]
    assert steps.current is None


def one_rank_stays_away(rank: int, world_size: int) -> None:
    steps = StepCoordinator(torch.distributed.group.WORLD)
    assert steps.begin(rank) == Step(num_tokens=(0, 1, 2))
    assert steps.scheduler.exchange(rank, 5, 2**32 - 1) == [[0, 5, 2**32 - 1], [1, 5, 2**32 - 1], [2, 5, 2**32 - 1]]
    if rank != 1:
        # Not from the start: ranks need longer to connect.
        assert steps.scheduler.peers is not None
        steps.scheduler.peers.timeout_s = 3.0
        late = rf"next step .*EP rank {rank}, .*: rank 1 did not .*: call moe_ep.serve, or make passes"
        with pytest.raises(DispatchTimeoutError, match=late) as error:
            steps.begin(None)
        assert error.value.ranks == (1,)


def test_a_rank_that_stays_away_is_named_by_the_others() -> None:
    pool = RankPool(3)
    try:
        pool.run(one_rank_stays_away)
    finally:
        pool.close()


def as_ep_implementation(rank: int, world_size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    alone = make_model("Qwen3Moe", num_experts=6)
    plan = {}
    for name, _ in find_experts(alone):
        plan |= {f"{name}.gate_up_proj": "grouped_gemm", f"{name}.down_proj": "grouped_gemm"}
        plan[name] = "ep_dispatch_experts"
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("ep", "tp"))
    model = apply_expert_parallelism(copy.deepcopy(alone), mesh["ep"], mesh["tp"], plan, ep_implementation="moe_ep")
    torch.manual_seed(rank)
    for length in (4, 9 - rank):
        tokens = torch.randint(1, SIZES["vocab_size"], (rank + 1, length))
        with torch.no_grad():
            assert relative_error(model(tokens).logits, alone(tokens).logits) < tolerance(torch.float32)


def test_as_an_ep_implementation() -> None:
    pytest.importorskip("transformers.distributed.expert_parallel", reason="transformers 5.21 and later have them")
    ranks(3).run(as_ep_implementation)
