"""Configuration: what is derived, what is refused and in which words."""

import pytest
import torch

from moe_ep.config import FusedMoEConfig, FusedMoEParallelConfig, FusedMoEQuantConfig


@pytest.mark.parametrize(
    ("sizes", "rank", "world_size", "expected"),
    [
        ({}, 0, None, (1, 1, 1)),
        ({}, 3, 4, (1, 4, 4)),
        ({"ep_size": 1}, 0, 1, (1, 1, 1)),
        ({"ep_size": 1}, 3, 4, (1, 4, 1)),
        ({"ep_size": 4}, 2, None, (1, 4, 4)),
        ({"tp_size": 2}, 1, 2, (2, 1, 1)),
        ({"tp_size": 2, "ep_size": 4}, 3, 4, (2, 2, 4)),
        ({"dp_size": 3}, 2, 3, (1, 3, 3)),
        ({"tp_size": 2, "dp_size": 2}, 1, 4, (2, 2, 4)),
        ({"tp_size": 2, "dp_size": 2, "ep_size": 1}, 1, 4, (2, 2, 1)),
        ({"tp_size": 4, "ep_size": 4}, 1, 4, (4, 1, 4)),
    ],
)
def test_make_derives_what_is_left_out(sizes, rank, world_size, expected):
    config = FusedMoEParallelConfig.make(**sizes, rank=rank, world_size=world_size)
    assert (config.tp_size, config.dp_size, config.ep_size) == expected
    assert config.dp_rank * config.tp_size + config.tp_rank == rank
    assert config.ep_rank == (rank if config.ep_size > 1 else 0)


def test_who_dispatches_and_who_shards():
    def flags(**sizes):
        config = FusedMoEParallelConfig.make(**sizes)
        return config.use_ep, config.use_all2all, config.shards_experts

    assert flags() == (False, False, False)
    assert flags(ep_size=4) == (True, True, False)
    assert flags(tp_size=2) == (False, False, True)
    assert flags(tp_size=4, ep_size=4) == (True, False, False)
    assert flags(tp_size=4, ep_size=4, is_sequence_parallel=True) == (True, True, False)
    assert flags(tp_size=2, dp_size=2) == (True, True, False)
    assert FusedMoEParallelConfig.make(ep_size=4, rank=3).token_rank == 3
    assert FusedMoEParallelConfig.make(tp_size=4, ep_size=4, rank=3).token_rank == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tp_size": 2, "dp_size": 2, "ep_size": 3}, ["ep_size is 3", "2 * 2 = 4"]),
        ({"tp_size": 4, "ep_size": 2}, ["ep_size is 2", "4 * 1 = 4"]),
        ({"tp_size": 4, "world_size": 2}, ["asks for 4 ranks", "there are 2"]),
        ({"dp_size": 2, "rank": 2}, ["rank is 2", "below"]),
        ({"tp_size": 0, "dp_size": 4}, ["tp_size is 0", "at least 1"]),
        ({"expert_placement_strategy": "zigzag"}, ["zigzag", "linear", "round_robin"]),
        ({"all2all_backend": "carrier"}, ["all2all_backend is 'carrier'", "no_ep", "all_to_all"]),
        ({"world_size": 0}, ["world_size is 0", "at least 1"]),
        ({"world_size": "2"}, ["world_size is '2'", "whole number"]),
        ({"dp_size": 2, "rank": None}, ["rank is None", "whole number"]),
    ],
)
def test_make_refuses_in_one_sentence(arguments, words):
    with pytest.raises((ValueError, TypeError)) as error:
        FusedMoEParallelConfig.make(**arguments)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["tp", "dp", "ep"])
def test_one_rank_unless_more_are_asked_for(kind):
    alone = FusedMoEParallelConfig()
    assert (getattr(alone, f"{kind}_rank"), getattr(alone, f"{kind}_size")) == (0, 1)
    with pytest.raises(ValueError, match=rf"{kind}_rank is 2; it must be at least 0 and below {kind}_size \(2\)"):
        FusedMoEParallelConfig(**{f"{kind}_rank": 2, f"{kind}_size": 2})
    with pytest.raises(TypeError, match=f"{kind}_rank is 0.5; it must be a whole number"):
        FusedMoEParallelConfig(**{f"{kind}_rank": 0.5, f"{kind}_size": 2})


def config(**changes):
    fields = {
        "num_experts": 8,
        "experts_per_token": 2,
        "hidden_dim": 16,
        "intermediate_size_per_partition": 32,
        "num_local_experts": 8,
        "moe_parallel_config": FusedMoEParallelConfig.make(),
        "in_dtype": torch.bfloat16,
        "max_num_tokens": 4,
    }
    return FusedMoEConfig(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts": 0}, ["num_experts is 0"]),
        ({"experts_per_token": 9}, ["experts_per_token (top_k) is 9", "num_experts (8)"]),
        ({"max_num_tokens": 0}, ["max_num_tokens is 0"]),
        ({"in_dtype": torch.int8}, ["in_dtype", "torch.int8", "torch.bfloat16"]),
        ({"activation": "swish"}, ["activation", "swish", "silu"]),
        ({"num_local_experts": -1}, ["num_local_experts is -1"]),
        ({"moe_parallel_config": None}, ["moe_parallel_config is None", "FusedMoEParallelConfig.make()"]),
    ],
)
def test_layer_config_refuses(changes, words):
    with pytest.raises((ValueError, TypeError)) as error:
        config(**changes)
    assert all(word in str(error.value) for word in words)


def test_layer_config_counts_shared_experts_behind_the_routed():
    assert config(num_fused_shared_experts=2).global_num_experts == 10


def test_quant_config_knows_the_wire_dtypes():
    assert not FusedMoEQuantConfig.unquantized().is_quantized
    wire = FusedMoEQuantConfig(dispatch_dtype=torch.float8_e4m3fn)
    assert wire.dispatch_dtype is torch.float8_e4m3fn
    with pytest.raises(ValueError, match="dispatch_dtype is torch.uint8"):
        FusedMoEQuantConfig(dispatch_dtype=torch.uint8)
    for name in ("dispatch_dtype", "input_dtype"):
        with pytest.raises(ValueError, match=rf"^{name} is \[\]; it must be None"):
            FusedMoEQuantConfig(**{name: []})
