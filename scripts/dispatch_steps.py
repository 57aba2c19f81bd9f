"""What bench_dispatch times: one prepare + finalize of a backend, what it must leave, and the bytes that it moves."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from moe_ep.bench.workload import Routing, draw_logits, parse_routing
from moe_ep.config import FusedMoEConfig, FusedMoEParallelConfig, FusedMoEQuantConfig
from moe_ep.dispatch.batched_all_to_all import MessageLayout
from moe_ep.dispatch.payload import destinations, owner_of
from moe_ep.expert_map import expert_owner_table
from moe_ep.kernels.quantize import dequantize_rows, quantize_rows, quantized_row_bytes
from moe_ep.modular_kernel.contracts import FusedMoEActivationFormat, FusedMoEPrepareAndFinalize
from moe_ep.modular_kernel.weight_and_reduce import TopKWeightAndReduceDelegate, TopKWeightAndReduceNoOP
from moe_ep.registry import ALL2ALL_BACKENDS

DTYPE = torch.bfloat16
ONE_RANK = "one_rank"
BY_REFERENCE = ":by_reference"
# Backends whose time depends on the capacity get that of the step; this one has room for all of a decode's sizes, and
# is not asked for more tokens: its experts' results would take tens of gigabytes.
_ROOMY = "nvshmem_low_latency"
_MOST_OF_DECODE = 1024
# Of several hosts; measured where it is asked for.
TWO_LEVEL = "two_level"
# In graphs it hands over worst-case rows.
_PREFILL = "nvshmem_high_throughput"


_COMPILERS = 4


class Setting(NamedTuple):
    """A row of the benchmark.

    Attributes:
        backend: a name, which may end in BY_REFERENCE.
        graph: in a CUDA graph, where the backend can be.
        num_sms: None leaves it to the backend.
    """

    backend: str
    fp8: bool
    num_tokens: int
    capacity: int
    graph: bool
    num_sms: int | None = None

    @property
    def name(self) -> str:
        return self.backend.removesuffix(BY_REFERENCE)


def settings(args: argparse.Namespace) -> list[Setting]:
    """All rows that the options ask for, in order."""
    made = []
    most = max([*args.graph_tokens, 1])
    for backend in args.backends:
        name = backend.removesuffix(BY_REFERENCE)
        for fp8 in [wire == "fp8" for wire in args.wires]:
            for num_tokens in args.graph_tokens:
                capacity = most if name == _ROOMY else num_tokens
                made.append(Setting(backend, fp8, num_tokens, capacity, args.device == "cuda"))
            for num_tokens in args.eager_tokens:
                if name == _ROOMY and num_tokens > _MOST_OF_DECODE:
                    continue
                several = args.num_sms if name == _PREFILL else [None]
                made += [Setting(backend, fp8, num_tokens, num_tokens, False, num_sms) for num_sms in several]
    return made


def compile_kernels(commands: Sequence[argparse.Namespace], rank: int, size: int, device: torch.device) -> None:
    """Compiles this rank's share of what the NVSHMEM backends of all commands will ask for, several at a time."""
    from moe_ep.dispatch.nvshmem import high_throughput as prefill
    from moe_ep.dispatch.nvshmem import low_latency as decode

    sources = {}
    for args in commands:
        for hidden, topk, wire in itertools.product(args.hidden, args.topk, args.wires):
            shape: dict[str, Any] = {"num_ranks": size, "capacity": 1, "hidden_size": hidden, "topk": topk}
            shape["code_dtype"] = torch.float8_e4m3fn if wire == "fp8" else None
            if any(backend.startswith(_ROOMY) for backend in args.backends):
                small = decode.BatchLayout(**shape)
                sources |= {decode.kernel_source(name, small, DTYPE): None for name in decode.KERNELS}
            if _PREFILL in args.backends:
                large = prefill.Layout(**shape)
                sources |= {prefill.kernel_source(name, large, DTYPE): None for name in large.kernels}
    with ThreadPoolExecutor(_COMPILERS) as pool:
        list(pool.map(lambda source: source.compile_ahead(device), list(sources)[rank::size]))


def usable_backends(device: torch.device) -> dict[str, str | None]:
    """Every face of every backend of several ranks; why it cannot run here, None where it can."""
    found: dict[str, str | None] = {}
    for name in ALL2ALL_BACKENDS:
        if name == "no_ep":
            continue
        reason = ALL2ALL_BACKENDS.load(name).unusable_reason()
        found[name] = "it needs GPUs" if reason is None and "nvshmem" in name and device.type != "cuda" else reason
        if name == _ROOMY:
            found[name + BY_REFERENCE] = found[name]
    return found


def workloads(
    args: argparse.Namespace, rank: int, size: int, device: torch.device
) -> Iterator[tuple[dict[str, Any], Workload]]:
    """Every hidden size with every top-k and routing, and what this rank's steps work on there."""
    for hidden, topk, routing in itertools.product(args.hidden, args.topk, args.routing):
        shape = {"hidden": hidden, "topk": topk, "routing": routing}
        yield shape, Workload(argparse.Namespace(**{**vars(args), **shape}), rank, size, device)


class Step(NamedTuple):
    """One prepare + finalize, experts left out.

    Attributes:
        prepare: returns what finalize takes.
        finalize: leaves its output where `is_wrong` looks.
        is_wrong: a bool `[]`: whether one step's output differs from what it must be, in any bit.
        check: what a backend says of waits that failed.
        num_sms: of a backend that has the choice.
        capturable: whether it may be a part of a CUDA graph.
    """

    prepare: Callable[[], Any]
    finalize: Callable[[Any], None]
    is_wrong: Callable[[], torch.Tensor]
    check: Callable[[], None]
    num_sms: int | None
    capturable: bool

    def __call__(self, _: int = 0) -> None:
        self.finalize(self.prepare())


class Workload:
    """What the steps of one rank work on."""

    def __init__(self, args: argparse.Namespace, rank: int, size: int, device: torch.device) -> None:
        self.args, self.rank, self.size, self.device = args, rank, size, device
        owners = expert_owner_table(size, args.experts, "linear", 0, rank)
        local = owners == rank
        self.num_local = int(local.sum())
        expert_map = torch.where(local, local.cumsum(0) - 1, -1).to(torch.int32)
        self.expert_map = None if size == 1 else expert_map.to(device)
        self.owners = owners.to(device)
        self._backends: dict[tuple, FusedMoEPrepareAndFinalize] = {}

    def forget(self) -> None:
        """Gives the backends' memory back."""
        self._backends.clear()

    def backend_of(self, setting: Setting) -> FusedMoEPrepareAndFinalize:
        key = (setting.name, setting.fp8, setting.capacity)
        if key not in self._backends:
            config = FusedMoEConfig(
                num_experts=self.args.experts,
                experts_per_token=self.args.topk,
                hidden_dim=self.args.hidden,
                intermediate_size_per_partition=self.args.hidden,
                num_local_experts=self.num_local,
                moe_parallel_config=FusedMoEParallelConfig.make(ep_size=self.size, rank=self.rank),
                in_dtype=DTYPE,
                max_num_tokens=setting.capacity,
            )
            quant_config = FusedMoEQuantConfig(dispatch_dtype=torch.float8_e4m3fn if setting.fp8 else None)
            cls = ALL2ALL_BACKENDS.load(setting.name)
            self._backends[key] = cls(moe_config=config, quant_config=quant_config)
        backend: Any = self._backends[key]
        if setting.name == _ROOMY:
            backend.by_reference = setting.backend.endswith(BY_REFERENCE)
        if setting.num_sms is not None:
            backend.num_sms = setting.num_sms
        return backend

    def draw(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(rows, weights, ids) of this rank; no id occurs twice in a row."""
        args, seed = self.args, self.args.seed * 1000 + self.rank
        one_rank = args.routing == ONE_RANK
        routing = Routing() if one_rank else parse_routing(args.routing)
        logits = draw_logits(routing, num_tokens, args.experts, args.topk, seed=seed, popularity_seed=args.seed)
        if one_rank:
            logits[:, self.owners.cpu() != 0] = -torch.inf
        generator = torch.Generator(self.device).manual_seed(seed)
        rows = torch.randn(num_tokens, args.hidden, generator=generator, device=self.device).to(DTYPE)
        weights = torch.rand(num_tokens, args.topk, generator=generator, device=self.device)
        return rows, weights, logits.topk(args.topk, dim=1).indices.to(self.device, torch.int32)

    def step(self, setting: Setting) -> Step:
        backend: Any = self.backend_of(setting)
        rows, weights, ids = self.draw(setting.num_tokens)
        output = torch.empty_like(rows)
        unquantized = FusedMoEQuantConfig.unquantized()
        batched = backend.activation_format() is FusedMoEActivationFormat.BatchedExperts
        reduce_impl = TopKWeightAndReduceDelegate() if batched else TopKWeightAndReduceNoOP()
        by_host = backend.by_host if setting.name == TWO_LEVEL else [range(self.size)]
        # Of rows by reference the experts make what the combine takes, here beforehand.
        results: list[torch.Tensor] = []

        def prepare() -> Any:
            return backend.prepare(rows, weights, ids, self.args.experts, self.expert_map, False, unquantized)

        def finalize(prepared: Any) -> None:
            arrived, _, meta, their_ids, their_weights = prepared
            if meta is not None and meta.expert_row_ids is not None:
                if not results:
                    results.append(_expanded(arrived, meta))
                arrived = results[0]
            its = (weights, ids) if batched else (their_weights, their_ids)
            backend.finalize(output, arrived, *its, False, reduce_impl)

        def is_wrong() -> torch.Tensor:
            expected = self._expected(rows, weights, ids, setting.fp8, batched, by_host)
            return torch.tensor(not torch.equal(output, expected), dtype=torch.int32, device=self.device)

        check = getattr(backend, "check", lambda: None)
        return Step(
            prepare, finalize, is_wrong, check, getattr(backend, "num_sms", None), backend.supports_cuda_graph()
        )

    def _expected(
        self,
        rows: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        fp8: bool,
        batched: bool,
        by_host: Sequence[Sequence[int]],
    ) -> torch.Tensor:
        """The output where experts hand back their rows: weighted per slot when batched, once a rank when not.

        Args:
            by_host: ranks that are added up, and rounded, before the others.
        """
        if fp8:
            rows = dequantize_rows(quantize_rows(rows), rows.size(1), DTYPE)
        owners, has = owner_of(ids, self.owners), destinations(ids, self.owners, self.size)
        total = torch.zeros(rows.shape, device=self.device)
        for ranks in by_host:
            of_host = torch.zeros_like(total)
            for rank in ranks:
                part = torch.where(has[:, rank, None], rows, 0).float()
                if batched:
                    part.zero_()
                    for slot in range(ids.size(1)):
                        weighted = rows.float() * weights[:, slot, None]
                        part += torch.where(owners[:, slot, None] == rank, weighted, 0.0)
                of_host += part.to(DTYPE).float()
            total += of_host.to(DTYPE).float()
        return total.to(DTYPE)

    def bytes_per_peer(self, setting: Setting) -> tuple[list[int], list[int]]:
        """Bytes that this rank dispatches to, and combines back to, each rank."""
        hidden, topk, num_tokens = self.args.hidden, self.args.topk, setting.num_tokens
        row_bytes = quantized_row_bytes(hidden) if setting.fp8 else hidden * DTYPE.itemsize
        back = hidden * DTYPE.itemsize
        if setting.backend == "batched_all_to_all":
            message = MessageLayout(self.args.experts, num_tokens, topk, row_bytes).message_bytes
            return [message] * self.size, [num_tokens * back] * self.size
        if setting.backend == "allgather_reducescatter":
            return [num_tokens * (row_bytes + 8 * topk)] * self.size, [num_tokens * back] * self.size
        counts = destinations(self.draw(num_tokens)[2], self.owners, self.size).sum(dim=0)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts)
        return [n * (row_bytes + 8 * topk) for n in counts.tolist()], [n * back for n in received.tolist()]


def _expanded(arrived: torch.Tensor, meta: Any) -> torch.Tensor:
    """A copy of a row for each of its experts, `[El, R * C, K]`; zeros behind an expert's last."""
    row_ids, counts = meta.expert_row_ids, meta.expert_num_tokens.tolist()
    copies = arrived.new_zeros((row_ids.size(0), row_ids.size(1), arrived.size(1)))
    for expert, count in enumerate(counts):
        copies[expert, :count] = arrived[row_ids[expert, :count].long()]
    return copies
