"""DeepEP's low-latency pair as a peer of bench_dispatch.py: one dispatch and one combine, chained in a CUDA graph.

It runs in processes of its own, as DeepEP and the backends here both begin NVSHMEM. Experts hand back what arrived; of
e4m3 rows that is made beforehand. DeepEP returns a row of every expert, weighted by the receiver, where the backends
here add up a rank's rows first.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from dispatch_steps import DTYPE, Workload, workloads
from dispatch_times import time_pairs
from harness import join_ranks
from peer_package import PeerPackage, PeerUnavailableError, first_line

from moe_ep.bench.results import append_line, facts

BACKEND = "deepep_low_latency"
PACKAGE = PeerPackage(
    module="deep_ep", name="tokenspeed-deepep", known_good="1.2.1.post20251110", needs=("Buffer", "topk_idx_t")
)
# Of the output's largest value: rows are rounded, those of e4m3 twice, and slots added in another order.
_TOLERANCES = {"bf16": 0.02, "fp8": 0.1}


class LowLatencyPair:
    """A buffer of DeepEP for batches of up to `capacity` tokens a rank.

    Raises:
        PeerUnavailableError: as `PeerPackage.load`, or DeepEP does not start here.
    """

    def __init__(self, workload: Workload, capacity: int) -> None:
        module = PACKAGE.load()
        self._workload, self._capacity, self._id_dtype = workload, capacity, module.topk_idx_t
        args, size = workload.args, workload.size
        num_bytes = module.Buffer.get_low_latency_rdma_size_hint(capacity, args.hidden, size, args.experts)
        try:
            self._buffer = module.Buffer(
                dist.group.WORLD, 0, num_bytes, low_latency_mode=True, num_qps_per_rank=args.experts // size,
                explicitly_destroy=True,
            )  # fmt: skip
        except (RuntimeError, AssertionError) as error:
            raise PeerUnavailableError(
                f"{PACKAGE.name} {PACKAGE.version()} does not start: {first_line(error)}"
            ) from error

    def close(self) -> None:
        self._buffer.destroy()

    def step(self, num_tokens: int, fp8: bool) -> tuple[Callable[[int], torch.Tensor], torch.Tensor]:
        """(a pair whose argument is ignored, how far its output is from what it must be: f32 `[]`).

        Raises:
            PeerUnavailableError: DeepEP refuses these sizes.
        """
        args = self._workload.args
        rows, weights, ids = self._workload.draw(num_tokens)
        ids, output = ids.to(self._id_dtype), torch.empty_like(rows)
        made: torch.Tensor | None = None  # results of e4m3 rows; an expert's rows come in any order, but cost the same

        def pair(_: int) -> torch.Tensor:
            arrived, _, handle, *_ = self._buffer.low_latency_dispatch(
                rows, ids, self._capacity, args.experts, use_fp8=fp8
            )
            given = arrived if made is None else made
            given = _widened(*given) if isinstance(given, tuple) else given
            self._buffer.low_latency_combine(given, ids, weights, handle, out=output)
            return output

        try:
            pair(0)
            torch.cuda.synchronize()
        except (RuntimeError, AssertionError) as error:
            raise PeerUnavailableError(
                f"{PACKAGE.name} {PACKAGE.version()} starts and fails in its first call ({first_line(error)})"
            ) from error
        expected = rows.float() * weights.sum(dim=1, keepdim=True)
        error = (output.float() - expected).abs().max() / expected.abs().max()
        if fp8:
            arrived, *_ = self._buffer.low_latency_dispatch(rows, ids, self._capacity, args.experts)
            made = _widened(*arrived)
            torch.cuda.synchronize()
            dist.barrier()
        return pair, error


def _widened(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """bf16 of e4m3 rows `[El, rows, K]` with a scale for every 128 columns."""
    groups = codes.float().unflatten(2, (scales.size(2), -1))
    return (groups * scales[..., None]).flatten(2).nan_to_num(0).to(DTYPE)


def run_rank(
    rank: int, size: int, commands: Sequence[argparse.Namespace], init_method: str, local_rank: int | None = None
) -> None:
    """One process of the benchmark; the first prints a row for each setting, or why there is none."""
    device = join_ranks(rank, size, init_method, "cuda", local_rank)
    for args in commands:
        for shape, workload in workloads(args, rank, size, device):
            try:
                _run_shape(workload, {"ranks": size, **shape, "experts": args.experts})
            except PeerUnavailableError as error:
                if rank == 0:
                    print(f"{BACKEND}: {error}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _run_shape(workload: Workload, about: dict[str, Any]) -> None:
    args = workload.args
    pair = LowLatencyPair(workload, max(args.graph_tokens))
    about |= {"package": f"{PACKAGE.name} {PACKAGE.version()}"}
    about |= facts(seed=args.seed, commit=args.commit, command=args.command)
    for wire, num_tokens in itertools.product(args.wires, args.graph_tokens):
        step, error = pair.step(num_tokens, wire == "fp8")
        dist.all_reduce(error, op=dist.ReduceOp.MAX)
        row = {"backend": BACKEND, "wire": wire, "tokens_per_rank": num_tokens, "mode": "graph"}
        if float(error) > _TOLERANCES[wire]:
            row["error"] = f"the output is {float(error):.3f} of its largest value off"
        else:
            timing = time_pairs(step, workload.device, graph=True, chain=args.chain, repeats=args.repeats)
            row |= {"median_us": round(timing.median, 1), "p99_us": round(timing.p99, 1)}
        if workload.rank == 0:
            said = row["error"] if "error" in row else f"{row['median_us']} us"
            print(f"{BACKEND} {wire} {num_tokens} tokens: {said}", flush=True)
            if args.json is not None:
                append_line(args.json, row | about)
    pair.close()
