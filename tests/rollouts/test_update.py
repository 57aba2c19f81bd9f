"""Weights updated in place: bit for bit what loading a checkpoint of the same tensors gives, wherever experts are."""

from __future__ import annotations

import gc
import json
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import moe_ep
from moe_ep.checkpoint import CheckpointReader, model_spec
from moe_ep.checkpoint.writer import write_checkpoint
from moe_ep.config import FusedMoEParallelConfig
from moe_ep.eplb.config import EplbConfig
from moe_ep.eplb.manager import EPLBManager
from moe_ep.errors import CheckpointError, WeightsError
from moe_ep.layer.stack import MoEStack
from moe_ep.rollouts import transports
from moe_ep.rollouts.transports import receive_weights, send_weights
from tests.checkpoint.format_cases import write_case
from tests.ranks import ranks

# Forms of checkpoints, and how they are quantized on load.
FORMS = [
    ("bf16", "none"),
    ("bf16", "int4"),
    ("bf16", "fp8"),
    ("bf16 gpt-oss", "none"),  # all experts in one tensor, transposed, gate and up in turns, with biases
    ("gptq 4 bits", "none"),
    ("gptq v1 4 bits act-order", "none"),
    ("packed int4 zero points", "none"),
    ("fp8 rows", "none"),
    ("fp8 blocks", "none"),
    ("mxfp4 per expert", "none"),
    ("mxfp4 gpt-oss", "none"),
    ("nvfp4 modelopt fused rows", "none"),
]
Tensors = dict[str, torch.Tensor]
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def read(folder: Path) -> Tensors:
    with CheckpointReader(folder) as reader:
        return {name: reader.read(name) for name in reader.names()}


def num_experts(folder: Path) -> int:
    with CheckpointReader(folder) as reader:
        return model_spec(reader.config, reader).num_experts


def other_weights(folder: Path, into: Path) -> Path:
    """The same checkpoint with every expert in the place of the next one, and with other norms and routers."""
    E, tensors = num_experts(folder), {}
    for name, tensor in read(folder).items():
        if found := _EXPERT.search(name):
            name = _EXPERT.sub(f".experts.{(int(found[1]) + 1) % E}.", name)
        elif ".experts." in name and tensor.dim() and tensor.size(0) == E:
            tensor = tensor.view(torch.uint8).roll(1, 0).view(tensor.dtype) if tensor.dim() > 1 else tensor.roll(1, 0)
        elif ".experts." not in name:
            tensor = tensor.flip(0)
        tensors[name] = tensor
    write_checkpoint(into, json.loads((folder / "config.json").read_text()), tensors.items())
    for file in folder.glob("hf_quant_config.json"):
        (into / file.name).write_bytes(file.read_bytes())
    return into


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Of each form a checkpoint, and one with other weights."""
    found = {}
    for form in dict.fromkeys(form for form, _ in FORMS):
        folder = tmp_path_factory.mktemp("form")
        write_case(form, folder / "a", with_values=False)
        found[form] = folder / "a", other_weights(folder / "a", folder / "b")
    return found


def load(folder: Path, world_size: int, rank: int = 0, **options: Any) -> MoEStack:
    parallel = FusedMoEParallelConfig.make(ep_size=world_size, rank=rank, world_size=world_size)
    with CheckpointReader(folder) as reader:
        spec = model_spec(reader.config, reader)
        return MoEStack(reader, spec, parallel, dtype=torch.bfloat16, max_num_tokens=16, **options)


def held(stack: MoEStack) -> list[torch.Tensor]:
    """Every tensor that a pass reads, but for the maps of EPLB."""
    experts = [tensor for block in stack.layers() for tensor in block.moe.expert_weights()]
    beside = [buffer for block in stack.layers() for buffer in block.buffers(recurse=False)]
    return experts + beside


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().reshape(-1).view(torch.uint8)


def shard_of(tensors: Tensors, E: int, rank: int, world_size: int) -> Tensors:
    """The experts that EP gives a rank, and all else."""
    owned = range(E * rank // world_size, E * (rank + 1) // world_size)
    shard = {}
    for name, tensor in tensors.items():
        if found := _EXPERT.search(name):
            if int(found[1]) not in owned:
                continue
        elif ".experts." in name and tensor.dim() and tensor.size(0) == E:
            tensor = tensor[owned.start : owned.stop]
        shard[name] = tensor
    return shard


def check_slots(stack: MoEStack, expected: MoEStack, rank: int) -> None:
    """Every slot holds what a process with all experts has loaded for its logical expert."""
    for block, whole in zip(stack.layers(), expected.layers(), strict=True):
        logical = block.moe.slots.logical_of_physical()
        count = block.moe.slots.num_local_routed
        for mine, of_all in zip(block.moe.expert_weights(), whole.moe.expert_weights(), strict=True):
            for slot, expert in enumerate(logical[rank * count : (rank + 1) * count]):
                assert torch.equal(bits(mine[slot]), bits(of_all[expert]))
        for mine, of_all in zip(block.buffers(recurse=False), whole.buffers(recurse=False), strict=True):
            assert torch.equal(bits(mine), bits(of_all))


def updated(rank: int, world_size: int, folders: dict[str, tuple[Path, Path]], source: str) -> None:
    """All forms, one after the other."""
    for form, quantize in FORMS:
        before, after = folders[form]
        stack, expected = (load(before, world_size, rank, quantize=quantize), load(after, 1, quantize=quantize))
        addresses = [tensor.data_ptr() for tensor in held(stack)]
        x = torch.randn(3, stack.spec.hidden_size, generator=torch.Generator().manual_seed(rank)).bfloat16()
        stack(x)
        tensors: Any = read(after)
        if source == "shard":
            tensors = shard_of(tensors, stack.spec.num_experts, rank, world_size)
        names = sorted(tensors, key=lambda name: hash(name[::-1]))
        given = after if source == "folder" else [(name, tensors[name]) for name in names]
        if form.startswith("bf16") and quantize == "none" and source != "folder":
            strided = [(name, torch.stack([tensor, tensor], dim=-1)[..., 0]) for name, tensor in given]
            for values in (given[::-1], [(name, tensor * 2) for name, tensor in given], strided):  # names come again
                moe_ep.update_weights(stack, values)
            check_slots(stack, expected, rank)
            moe_ep.update_weights(stack, [(name, tensor * 2) for name, tensor in given])
        moe_ep.update_weights(stack, given)
        assert [tensor.data_ptr() for tensor in held(stack)] == addresses
        check_slots(stack, expected, rank)
        assert torch.equal(stack(x), load(after, world_size, rank, quantize=quantize)(x))
    dropped = weakref.ref(stack)
    del stack
    gc.collect()
    assert dropped() is None


@pytest.mark.parametrize(
    ("num_ranks", "source"),
    [(1, "all"), (1, "folder"), (2, "shard"), pytest.param(4, "all", marks=pytest.mark.thorough)],
)
def test_updated_weights_are_those_of_a_checkpoint_bit_for_bit(
    num_ranks: int, source: str, folders: dict[str, tuple[Path, Path]]
) -> None:
    ranks(num_ranks).run(updated, folders, source)


def moved(rank: int, world_size: int, folders: dict[str, tuple[Path, Path]]) -> None:
    """Experts that have moved, and those that are moving, get the weights of where they are."""
    for form, quantize in (("bf16", "none"), ("gptq 4 bits", "none"), ("bf16 gpt-oss", "int4")):
        before, after = folders[form]
        stack, expected = load(before, world_size, rank, quantize=quantize, num_redundant_experts=4), None
        layers, E = [block.moe for block in stack.layers()], stack.spec.num_experts
        config = EplbConfig(interval=10**6, refine=False, commit_margin=1, timeout_s=20, planner="thread")
        manager = EPLBManager(layers, config)
        tensors = read(after)
        for seed, given in ((3, shard_of(tensors, E, rank, world_size)), (4, tensors)):
            expected = load(after, 1, quantize=quantize)
            rng = np.random.default_rng(seed)
            target = np.stack([rng.permutation(np.r_[:E, rng.integers(0, E, 4)]) for _ in layers])
            manager.rearrange(target)
            if seed == 3:
                manager.finish()
            moe_ep.update_weights(stack, given)
            assert not manager.busy and np.array_equal(manager.placement.host, target)
            check_slots(stack, expected, rank)
        manager.close()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_experts_that_have_moved_get_theirs(num_ranks: int, folders: dict[str, tuple[Path, Path]]) -> None:
    ranks(num_ranks).run(moved, folders)


def refused(rank: int, world_size: int, folder: Path) -> list[str]:
    """What is said of tensors that do not fit, on every rank; nothing changes."""
    stack, tensors = load(folder, world_size, rank, quantize="int4"), read(folder)
    before = [tensor.clone() for tensor in held(stack)]
    x = torch.ones(2, stack.spec.hidden_size).bfloat16()
    output, messages = stack(x), []
    expert, norm = "model.layers.1.mlp.experts.2.up_proj.weight", "model.layers.0.post_attention_layernorm.weight"
    changes: list[Tensors] = [
        {expert: None},
        {expert: tensors[expert][:-1]},
        {expert: tensors[expert].to(torch.int8)},
        {norm: None},
        {norm: tensors[norm][:-1]},
    ]  # type: ignore[dict-item]
    if world_size > 1:  # the ranks disagree
        changes.append({expert: tensors[expert][: rank - 2]})
    for change in changes:
        given = {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}
        with pytest.raises(WeightsError) as error:
            moe_ep.update_weights(stack, list(given.items()))
        messages.append(str(error.value))
    for wrong in ([*tensors.items(), *tensors.items()], [(3, 4)], 7, [("a", torch.empty(1, device="meta"))]):
        with pytest.raises((TypeError, ValueError)):
            moe_ep.update_weights(stack, wrong)  # type: ignore[arg-type]
    assert all(torch.equal(bits(now), bits(then)) for now, then in zip(held(stack), before, strict=True))
    assert torch.equal(stack(x), output)
    return messages


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_is_missing_or_misshapen_is_named_and_nothing_changes(
    num_ranks: int, folders: dict[str, tuple[Path, Path]]
) -> None:
    results = ranks(num_ranks).run(refused, folders["bf16"][0])
    for messages in zip(*results, strict=True):
        assert len(set(messages)) == 1
    names = ["layers.1.mlp.experts.2.up_proj.weight"] * 3 + ["layers.0.post_attention_layernorm.weight"] * 2
    names += ["layers.1.mlp.experts.2.up_proj.weight"] * (num_ranks > 1)
    assert all(name in message for name, message in zip(names, results[0], strict=True))


def broken(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Pairs of a stream that breaks off after the first."""
    yield next(iter(tensors.items()))
    raise RuntimeError("the stream broke off")


def refused_by_all(rank: int, world_size: int, folders: dict[str, tuple[Path, Path]]) -> list[str]:
    """What the ranks are told of a fault that is the last rank's; nothing changes, and the next update succeeds."""
    before, after = folders["bf16"]
    stack, old, new = load(before, world_size, rank), load(before, 1), load(after, 1)
    tensors, messages = read(after), []
    # What the last rank gives, what the others give, and what is the cause on the last one.
    cases: list[tuple[Any, Any, type[Exception] | None]] = [
        (broken(tensors), tensors, RuntimeError),
        (tensors | {"lm_head.weight": None}, tensors, ValueError),
        (after / "none", after, CheckpointError),
    ]
    if world_size > 1:
        cases += [(tensors, after, None), ([], after, None)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOE_EP_DISPATCH_TIMEOUT_S", "10")
        is_last = rank == world_size - 1
        for given, given_by_others, cause in cases:
            with pytest.raises(WeightsError) as error:
                moe_ep.update_weights(stack, given if is_last else given_by_others)
            messages.append(str(error.value))
            found = error.value.__cause__
            assert found is None if cause is None or not is_last else type(found) is cause
            check_slots(stack, old, rank)
            moe_ep.update_weights(stack, tensors)
            check_slots(stack, new, rank)
            moe_ep.update_weights(stack, before)
    return messages


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_tensors_that_a_rank_cannot_read_are_refused_by_all(
    num_ranks: int, folders: dict[str, tuple[Path, Path]]
) -> None:
    results = ranks(num_ranks).run(refused_by_all, folders)
    assert all(messages == results[0] for messages in results)
    assert all(("rank 1" in message) == (num_ranks > 1) for message in results[0])
    parts = ["the stream broke off", "lm_head.weight", str(folders["bf16"][1] / "none")]
    parts += ["a folder on rank 0", "a folder on rank 0"] * (num_ranks > 1)
    assert all(part in message for part, message in zip(parts, results[0], strict=True))


def absent_shard(rank: int, world_size: int, folders: dict[str, tuple[Path, Path]]) -> str:
    """What is said of the experts in a tensor of all experts that the last rank should give; nothing changes."""
    before, after = folders["bf16 gpt-oss"]
    stack, old, tensors = load(before, world_size, rank), load(before, 1), read(after)
    shard = shard_of(tensors, stack.spec.num_experts, rank, world_size)
    with pytest.raises(WeightsError) as error:
        moe_ep.update_weights(stack, {} if rank == world_size - 1 else shard)
    check_slots(stack, old, rank)
    moe_ep.update_weights(stack, shard)
    check_slots(stack, load(after, 1), rank)
    return str(error.value)


def test_a_shard_that_no_rank_gives_is_named(folders: dict[str, tuple[Path, Path]]) -> None:
    first, second = ranks(2).run(absent_shard, folders)
    assert first == second
    assert f"mlp.experts.down_proj[{num_experts(folders['bf16 gpt-oss'][0]) // 2}]" in first


def half_way(rank: int, world_size: int, folder: Path) -> None:
    """Values that turn out to be wrong while they are written leave no layer that runs, nor one that can be updated."""
    stack, tensors = load(folder, world_size, rank), read(folder)
    name = "model.layers.1.mlp.experts.0.up_proj.g_idx"  # gate and up of an expert must have the same
    tensors[name] = tensors[name].flip(0)
    with pytest.raises(CheckpointError, match="no layer runs any more"):
        moe_ep.update_weights(stack, tensors)
    for block in stack.layers():
        with pytest.raises(RuntimeError, match="half way"):
            block.moe.check_loaded()
    with pytest.raises(WeightsError, match="half way.* make and load the model again"):
        moe_ep.update_weights(stack, read(folder))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_failure_half_way_lets_nothing_run(num_ranks: int, folders: dict[str, tuple[Path, Path]]) -> None:
    ranks(num_ranks).run(half_way, folders["gptq v1 4 bits act-order"][0])


def model_updated(rank: int, world_size: int, family: str, folder: Path) -> None:
    """A model of transformers gets the weights of another one: by the names of its class, and from files."""
    from tests.hf.hf_models import make_model

    tokens = torch.randint(1, 90, (1, 6), generator=torch.Generator().manual_seed(rank))
    other = make_model(family)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for param in other.parameters():
            param.add_(torch.randn(param.shape, generator=generator) * 0.02)
    tensors = dict(other.state_dict())
    if rank == 0:
        other.save_pretrained(folder)
    wanted = moe_ep.parallelize(other)
    for source in (tensors, folder):
        if world_size > 1:
            torch.distributed.barrier()
        model = moe_ep.parallelize(make_model(family), eplb=True)
        with moe_ep.serving(model):
            for _ in range(rank):  # ranks make different numbers of passes before
                model(input_ids=tokens)
        moe_ep.update_weights(model, source)
        with moe_ep.serving(model), torch.no_grad():
            output = model(input_ids=tokens).logits
        with moe_ep.serving(wanted), torch.no_grad():
            assert torch.equal(output, wanted(input_ids=tokens).logits)


@pytest.mark.parametrize(
    ("num_ranks", "family"),
    [(1, "Olmoe"), (2, "DeepseekV2"), (2, "GptOss"), (1, "DeepseekV3"), (1, "Mixtral"), (2, "NemotronH")],
)
def test_models_of_transformers(num_ranks: int, family: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    ranks(num_ranks).run(model_updated, family, tmp_path)


@pytest.mark.parametrize("family", ["MiniMaxM2", "ExaoneMoe", "KimiLinear"])
def test_weights_beside_the_experts_under_the_names_of_files(family: str, tmp_path: Path) -> None:
    """transformers renames the biases of these routers, and puts the convolutions of Kimi Linear together."""
    pytest.importorskip("transformers")
    from tests.hf.hf_models import make_model
    from tests.hf.test_families import OTHERS

    before, after = (make_model(family, **OTHERS[family]) for _ in range(2))
    with torch.no_grad():
        for tensor in after.state_dict().values():
            tensor.add_(torch.randn(tensor.shape) * 0.02)
    after.save_pretrained(tmp_path)
    model, tensors = moe_ep.parallelize(before), read(tmp_path)
    changed = [name for name in tensors if name.endswith(("e_score_correction_bias", "q_conv1d.weight"))]
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for wrong in ({changed[0]: tensors[changed[0]][1:]}, {}):
        given = {name: tensor for name, tensor in tensors.items() if name != changed[0]} | wrong
        with pytest.raises(WeightsError, match=r"bias|conv1d"):
            moe_ep.update_weights(model, given)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())
    for source in (tmp_path, tensors):
        moe_ep.update_weights(model, source)
        text = torch.arange(1, 9)[None]
        with torch.no_grad():
            torch.testing.assert_close(model(input_ids=text).logits, after(input_ids=text).logits)


@pytest.mark.parametrize("family", ["GraniteMoe", "LongcatFlash", "Inkling"])
def test_experts_under_the_names_of_a_class(family: str) -> None:
    """Those that files call otherwise, with rows of identity experts, and that files have in turns."""
    pytest.importorskip("transformers")
    from tests.hf.hf_models import make_model
    from tests.hf.test_families import OTHERS
    from tests.hf.test_language_parts import PARTS, make_whole

    before, after = (make_whole(family) if family in PARTS else make_model(family, **OTHERS[family]) for _ in range(2))
    with torch.no_grad():
        for tensor in after.parameters():
            tensor.add_(torch.randn(tensor.shape) * 0.02)
    model, text = moe_ep.parallelize(before), torch.arange(1, 9)[None]
    moe_ep.update_weights(model, after.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=text).logits, after(input_ids=text).logits)


def test_the_state_dict_of_a_whole_model_for_its_language_model(tmp_path: Path) -> None:
    """`parallelize` takes the class of Dots3-Note's language model, a trainer may have that of the whole."""
    pytest.importorskip("transformers")
    from tests.hf.test_language_parts import make_whole

    whole, text = make_whole("Dots3Note"), torch.arange(1, 9)[None]
    whole.save_pretrained(tmp_path)
    model = moe_ep.parallelize(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        for tensor in whole.parameters():
            tensor.add_(torch.randn(tensor.shape) * 0.02)
        moe_ep.update_weights(model, whole.state_dict())
        torch.testing.assert_close(model(input_ids=text).logits, whole(input_ids=text).logits)


def test_a_generation_that_was_made_before_has_the_new_norms() -> None:
    """Qwen3-Next's norms store their weights less one, and a generation adds it once."""
    pytest.importorskip("transformers")
    from moe_ep.generation.engine import Generation, Request
    from tests.hf.hf_models import make_model

    model, tensors = moe_ep.parallelize(make_model("Qwen3Next")), make_model("Qwen3Next").state_dict()
    tensors = {name: tensor + 0.5 if "norm" in name else tensor for name, tensor in tensors.items()}
    requests, settings = [Request(0, torch.arange(1, 6))], {"max_new_tokens": 4, "num_slots": 1, "stop_ids": []}
    before = Generation(model, requests, **settings, logprobs=0)
    moe_ep.update_weights(model, tensors)
    assert before.run() == Generation(model, requests, **settings, logprobs=0).run()


def sent(rank: int, world_size: int, folder: tuple[Path, Path], form: str) -> None:
    """Rank 0 trains, the others generate."""
    engine_ranks = list(range(1, world_size))
    engines = torch.distributed.new_group(engine_ranks)
    group = torch.distributed.group.WORLD
    before, after = folder
    if rank == 0:
        send_weights(read(after).items(), group)
        return
    parallel = FusedMoEParallelConfig.make(ep_size=world_size - 1, rank=rank - 1, world_size=world_size - 1)
    with CheckpointReader(before) as reader:
        spec = model_spec(reader.config, reader)
        stack = MoEStack(reader, spec, parallel, dtype=torch.bfloat16, process_group=engines)
    # Experts of one rank only; update_weights sends them to the other.
    tensors = receive_weights(group, 0, keep=lambda name: ".experts.3." not in name or rank == 1)
    moe_ep.update_weights(stack, tensors)
    check_slots(stack, load(after, 1), rank - 1)


def test_weights_that_a_trainer_sends(folders: dict[str, tuple[Path, Path]]) -> None:
    for form in ("bf16", "fp8 blocks"):
        ranks(3).run(sent, folders[form], form)


def test_handles_are_of_memory_on_a_gpu() -> None:
    with pytest.raises(ValueError, match="a.weight"):
        transports.share_weights([("a.weight", torch.zeros(2))])
    for text in ("no JSON", "[3]", '[{"name": "a"}]'):
        with pytest.raises(ValueError, match="share_weights"):
            transports.open_weights(text)


def test_what_is_no_tensor_is_not_sent() -> None:
    with pytest.raises(ValueError, match=r"a\.weight is a list; it must be a tensor"):
        send_weights([("a.weight", [1.0])], None)
