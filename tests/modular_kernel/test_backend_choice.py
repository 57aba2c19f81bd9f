"""What all2all_backend="auto" becomes and the reason that is logged, on machines that are only described."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from moe_ep.config import FusedMoEConfig, FusedMoEParallelConfig
from moe_ep.errors import BackendUnavailableError, ConfigError
from moe_ep.modular_kernel import choice
from moe_ep.modular_kernel.choice import DECODE_MAX_NUM_TOKENS, REFERENCE, choose_backend, choose_experts
from moe_ep.registry import ALL2ALL_BACKENDS, EXPERTS
from tests.ranks import ranks

FEW, MANY = DECODE_MAX_NUM_TOKENS, DECODE_MAX_NUM_TOKENS + 1


def config(ep_size: int = 4, **changes: object) -> FusedMoEConfig:
    made = FusedMoEConfig(
        num_experts=64,
        experts_per_token=8,
        hidden_dim=7168,
        intermediate_size_per_partition=2048,
        num_local_experts=64 // ep_size,
        moe_parallel_config=FusedMoEParallelConfig.make(ep_size=ep_size, rank=0),
        in_dtype=torch.bfloat16,
        max_num_tokens=FEW,
    )
    return replace(made, **changes)


def has_gpus(machine: pytest.MonkeyPatch) -> None:
    """Lets torch see four GPUs that reach each other."""
    for target, value in (
        (torch.cuda.is_available, True),
        (torch.cuda.current_device, 0),
        (torch.cuda.device_count, 4),
    ):
        machine.setattr(torch.cuda, target.__name__, lambda value=value: value)
    machine.setattr(torch.cuda, "can_device_access_peer", lambda here, peer: True)
    machine.setattr(torch.cuda, "mem_get_info", lambda device: (0, 140 * 10**9))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A host whose GPUs reach each other, with everything installed; a test takes away from it."""
    has_gpus(monkeypatch)
    monkeypatch.setattr(choice.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(choice.dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(choice, "num_hosts", lambda group: 1)
    monkeypatch.setattr(choice, "answers_of_ranks", lambda question, mine, group: (mine,))
    for name in ("nvshmem_low_latency", "nvshmem_high_throughput"):
        monkeypatch.setattr(ALL2ALL_BACKENDS.load(name), "unusable_reason", classmethod(lambda cls: None))
    return monkeypatch


def chosen(caplog: pytest.LogCaptureFixture, made: FusedMoEConfig) -> tuple[str, str]:
    caplog.clear()
    with caplog.at_level(logging.INFO, "moe_ep.modular_kernel.choice"):
        name = choose_backend("auto", made)
    return name, caplog.messages[-1]


@pytest.mark.parametrize(
    ("capacity", "name", "why"),
    [
        (FEW, "nvshmem_low_latency", f"reach each other's memory, and a capacity of {FEW} tokens per rank (at most"),
        (
            MANY,
            "nvshmem_high_throughput",
            f"reach each other's memory, and a capacity of {MANY} tokens per rank (above",
        ),
    ],
)
def test_gpus_of_one_host(
    gpus: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capacity: int, name: str, why: str
) -> None:
    found, logged = chosen(caplog, config(max_num_tokens=capacity))
    assert found == name and logged.startswith(f"all2all backend {name}: ") and why in logged


@pytest.mark.parametrize(
    ("capacity", "instead", "refused"),
    [(FEW, "batched_all_to_all", "nvshmem_low_latency"), (MANY, "all_to_all", "nvshmem_high_throughput")],
)
@pytest.mark.parametrize("obstacle", ["hosts", "peers", "package", "dtype", "columns", "ranks", "memory"])
def test_what_stands_in_the_way_is_said(
    gpus: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    obstacle: str,
    capacity: int,
    instead: str,
    refused: str,
) -> None:
    made = config(max_num_tokens=capacity)
    if obstacle == "hosts":
        gpus.setattr(choice, "num_hosts", lambda group: 2)
        why = "the ranks are on several hosts"
    elif obstacle == "peers":
        gpus.setattr(torch.cuda, "can_device_access_peer", lambda here, peer: peer != 3)
        why = "not all GPUs of this host reach each other's memory"
    elif obstacle == "package":
        gpus.setattr(ALL2ALL_BACKENDS.load(refused), "unusable_reason", classmethod(lambda cls: "pip install it"))
        why = "pip install it"
    elif obstacle == "dtype":
        made = replace(made, in_dtype=torch.float32)
        why = f"in_dtype is torch.float32; for {refused} it must be torch.float16 or bfloat16"
    elif obstacle == "columns":
        made = replace(made, hidden_dim=7160)
        why = f"hidden_dim is 7160; for {refused} it must be a multiple of 16"
    elif obstacle == "ranks":
        made = config(32, max_num_tokens=capacity)
        why = f"ep_size is 32; for {refused} it must be at most {16 if capacity == FEW else 8}"
    else:
        gpus.setattr(torch.cuda, "mem_get_info", lambda device: (0, 10**8))
        why = "of 0.1 GB; lower max_num_tokens for it"
    found, logged = chosen(caplog, made)
    assert found == instead
    assert f"not {refused}: " in logged and logged.endswith(why)


def one_cannot(rank: int, world_size: int) -> tuple[str, str]:
    """What a rank chooses, and why, where the package is missing on rank 1 alone."""
    with pytest.MonkeyPatch.context() as machine:
        has_gpus(machine)
        machine.setattr(choice.dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
        reason = "pip install it" if rank == 1 else None
        backend = ALL2ALL_BACKENDS.load("nvshmem_low_latency")
        machine.setattr(backend, "unusable_reason", classmethod(lambda cls: reason))
        logged: list[tuple[str, str]] = []
        machine.setattr(choice.logger, "info", lambda message, name, why: logged.append((name, why)))
        names = [choose_backend("auto", config(world_size)) for _ in range(2)]
        assert logged[0] == logged[1] and names == [name for name, _ in logged]
        return logged[0]


def test_all_ranks_choose_alike() -> None:
    chosen = ranks(2).run(one_cannot)
    assert [name for name, _ in chosen] == ["batched_all_to_all"] * 2
    assert chosen[0][1].endswith("not nvshmem_low_latency: EP rank 1: pip install it")
    assert chosen[1][1].endswith("not nvshmem_low_latency: pip install it")


def test_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    assert chosen(caplog, config(ep_size=1)) == ("no_ep", "all2all backend no_ep: one rank holds every expert")
    name, logged = chosen(caplog, config())
    assert name == "all_to_all" and "no NCCL between the ranks" in logged


def test_a_named_backend_that_cannot_run_is_refused(gpus: pytest.MonkeyPatch) -> None:
    assert choose_backend("all_to_all", config()) == "all_to_all"
    gpus.setattr(
        ALL2ALL_BACKENDS.load("nvshmem_low_latency"), "unusable_reason", classmethod(lambda cls: "pip install it")
    )
    with pytest.raises(BackendUnavailableError, match="'nvshmem_low_latency' cannot run here: pip install it"):
        choose_backend("nvshmem_low_latency", config())


def test_no_ep_is_refused_where_ranks_hold_different_tokens() -> None:
    assert choose_backend("no_ep", config(ep_size=1)) == "no_ep"
    same_tokens = FusedMoEParallelConfig.make(tp_size=4, ep_size=4)
    assert choose_backend("no_ep", config(moe_parallel_config=same_tokens)) == "no_ep"
    with pytest.raises(ConfigError, match=r"'no_ep', which moves nothing, and ep_size is 4.*: allgather_reducescatter"):
        choose_backend("no_ep", config())


def test_a_missing_package_of_the_gpu_experts_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reason = "cuda-core is not installed; run: pip install it"
    monkeypatch.setattr(EXPERTS.load("marlin"), "unusable_reason", classmethod(lambda cls: reason))
    monkeypatch.setattr(EXPERTS.load("marlin"), "refuses", classmethod(lambda cls, *layer: reason))
    weights: tuple = (object(), object())
    for device in ("cpu", "cuda:0", "cuda:0"):
        assert choose_experts("auto", config(), weights, torch.device(device)) is REFERENCE
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        f"quantized experts run in plain torch on cuda:0, many times slower than marlin: {reason}"
    ]
