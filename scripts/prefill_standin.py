"""Prefill's dispatch and combine as a rank of more ranks than there are GPUs has them.

    torchrun --nproc-per-node 4 scripts/prefill_standin.py --ranks 8 --num-sms 24,48

Each GPU is one of --ranks ranks. The memory of the others, where its rows for them go, lies on the other GPUs, dealt
out in turn; what those send it is what it takes, with the real flags and waits. So every GPU sends over its links and
takes as much as a rank of --ranks does, all at the same time. Left out are the first kernel (rows are placed
beforehand), the last handshake of 16-bit rows, and whatever other links more GPUs have. Rows are compared bit for bit.
Prints one line a setting: microseconds of a kernel with its launch, the slowest GPU, median, least and most of the
repeats.
"""

from __future__ import annotations

import argparse
import ctypes
import os
from typing import Any, NamedTuple

os.environ["NCCL_NVLS_ENABLE"] = "0"
os.environ["NVSHMEM_DISABLE_NVLS"] = "1"

import torch
import torch.distributed as dist
from harness import positive, positives, use_gpu_of_rank

from moe_ep.dispatch.nvshmem import kernels
from moe_ep.dispatch.nvshmem.arena import Region, SymmetricArena
from moe_ep.dispatch.nvshmem.high_throughput import Layout, common_type, kernel_source, senders_of
from moe_ep.kernels import jit
from moe_ep.kernels.quantize import dequantize_rows, quantize_rows

DTYPE = torch.bfloat16
KINDS = (("bf16 dispatch", "dispatch", False), ("fp8 dispatch", "dispatch", True), ("combine", "combine", False))
_THREADS = 1024
_HEAD_START_CYCLES = 300_000


class Exchange:
    """Who of `num_gpus` GPUs, each a rank of `num_ranks`, sends what to whom, and where it lies.

    GPU g is rank g and has rows for all ranks. Those for the rank `step` behind it go to GPU `g + _apart(step)`, which
    takes them for the rows of the rank `step` before its own.

    Args:
        goes: for each GPU bool `[T, num_ranks]`: which ranks a token goes to.
    """

    def __init__(self, goes: list[torch.Tensor]) -> None:
        self.goes, self.num_gpus, self.num_ranks = goes, len(goes), goes[0].size(1)
        self.counts = [has.sum(0).tolist() for has in goes]

    def _apart(self, step: int) -> int:
        return (step - 1) % (self.num_gpus - 1) + 1 if step else 0

    def target(self, gpu: int, rank: int) -> tuple[int, int]:
        """Which GPU takes what this one sends to `rank`, and as whose rows."""
        step = (rank - gpu) % self.num_ranks
        there = (gpu + self._apart(step)) % self.num_gpus
        return there, (there - step) % self.num_ranks

    def sender(self, gpu: int, source: int) -> tuple[int, int]:
        """Whose rows this GPU takes for those of `source`: a GPU, and the rank that it sends them to."""
        step = (gpu - source) % self.num_ranks
        there = (gpu - self._apart(step)) % self.num_gpus
        return there, (there + step) % self.num_ranks

    def first(self, gpu: int, rank: int) -> int:
        """The first of a GPU's rows for `rank` among all that it sends."""
        return sum(self.counts[gpu][:rank])

    def count(self, gpu: int, source: int) -> int:
        there, rank = self.sender(gpu, source)
        return self.counts[there][rank]

    def begin(self, gpu: int, source: int) -> int:
        """Where the rows of `source` begin on a GPU."""
        return sum(self.count(gpu, before) for before in range(source))

    def placement(self, gpu: int) -> list[int]:
        """`Placement` of cuda/high_throughput.cuh."""
        ranks = range(self.num_ranks)
        send = [self.begin(*self.target(gpu, rank)) - self.first(gpu, rank) for rank in ranks]
        begin = [self.begin(gpu, source) for source in ranks]
        home = [self.first(*self.sender(gpu, source)) - begin[source] for source in ranks]
        count = [self.count(gpu, source) for source in ranks]
        return [*send, *begin, *count, *home, sum(count)]

    def slots(self, gpu: int) -> torch.Tensor:
        """int32 `[T, num_ranks]`: as which of its rows a token is sent to each rank, -1 for none."""
        first = torch.tensor([self.first(gpu, rank) for rank in range(self.num_ranks)])
        has = self.goes[gpu]
        return torch.where(has, has.long().cumsum(0) - 1 + first, -1).int()


class Load(NamedTuple):
    """What a GPU sends and computes with."""

    exchange: Exchange
    gpu: int
    rows: list[torch.Tensor]
    topk_ids: torch.Tensor
    weights: torch.Tensor
    owners: torch.Tensor
    results: torch.Tensor


def draw(args: argparse.Namespace, gpu: int, num_gpus: int) -> Load:
    owners = (torch.arange(args.experts) * args.ranks // args.experts).int()
    ids, rows = [], []
    for each in range(num_gpus):
        generator = torch.Generator().manual_seed(each)
        scores = torch.rand(args.tokens, args.experts, generator=generator)
        ids.append(scores.topk(args.topk, dim=1).indices.int())
        on_gpu = torch.Generator("cuda").manual_seed(each)
        rows.append(torch.randn(args.tokens, args.hidden, generator=on_gpu, device="cuda").to(DTYPE))
    ranks = torch.arange(args.ranks)
    goes = [(owners[chosen.long()][:, :, None] == ranks).any(1) for chosen in ids]
    weights = torch.rand(args.tokens, args.topk, device="cuda")
    results = torch.randn(args.ranks * args.tokens, args.hidden, device="cuda").to(DTYPE)
    return Load(Exchange(goes), gpu, rows, ids[gpu].cuda(), weights, owners.cuda(), results)


class Kernel:
    """One kernel of one wire, ready to run again and again."""

    def __init__(self, load: Load, layout: Layout, region: Region, name: str) -> None:
        self.load, self.name = load, name
        exchange, gpu, num_ranks = load.exchange, load.gpu, layout.num_ranks
        # As BatchParts has them: epoch (2), finished blocks, nothing, what was taken (2), the placement.
        self.numbers = torch.zeros(6 + 4 * num_ranks + 1, dtype=torch.int32, device="cuda")
        self.numbers[6:] = torch.tensor(exchange.placement(gpu), dtype=torch.int32)
        self.status = torch.zeros(2, dtype=torch.int32, device="cuda")
        self.record = torch.zeros(3 + num_ranks, dtype=torch.int32, device="cpu", pin_memory=True)
        where = exchange.target if name == "dispatch" else exchange.sender
        first = self.numbers.data_ptr()
        common = common_type(num_ranks)(
            peers=(ctypes.c_uint64 * num_ranks)(*(region.peers[where(gpu, rank)[0]] for rank in range(num_ranks))),
            **layout.offsets,
            status=self.status.data_ptr(),
            record=self.record.data_ptr(),
            timeout_ns=2_000_000_000,
            epoch=first,
            finished=first + 8,
            taken=first + 16,
            placement=first + 24,
            rank=gpu,
        )
        slots = exchange.slots(gpu).cuda()
        if layout.is_quantized:
            self.received = torch.zeros_like(load.results)
        else:
            start = layout.offsets["rows"]
            self.received = region.local[start : start + layout.sizes["rows"]].view(DTYPE).view(load.results.shape)
        self.output = torch.full_like(load.rows[0], float("nan"))
        tensors = [load.results, slots, self.output]
        numbers = [len(slots)]
        if name == "dispatch":
            tensors = [load.rows[gpu], load.topk_ids, load.weights, load.owners, slots, self.received]
            numbers = [load.owners.numel(), len(slots), 0, 0, 0]
        self._layout, self._tensors = layout, tensors
        self.params = kernels.params_type(type(common), len(tensors), len(numbers))(common=common)
        self.params.pointers[:], self.params.numbers[:] = [tensor.data_ptr() for tensor in tensors], numbers
        self.kernel = jit.load(kernel_source(name, layout, DTYPE), torch.device("cuda", torch.cuda.current_device()))

    def microseconds(self, num_sms: int) -> float:
        """Of one run that all GPUs begin together."""
        if self.name == "dispatch":
            self.params.numbers[3:] = senders_of(self._layout, num_sms)
        self.numbers[:2].view(torch.int64).add_(1)
        self.numbers[4:6].zero_()
        torch.cuda.synchronize()
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_HEAD_START_CYCLES)
        dist.all_reduce(self.status[:1])
        begin.record()
        self.kernel.launch(self.params, (num_sms,), _THREADS)
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e3

    def is_right(self, fp8: bool) -> bool:
        if int(self.record[0]):
            return False
        if self.name == "combine":
            return not bool(self.output.isnan().any())
        exchange, gpu = self.load.exchange, self.load.gpu
        for source in range(exchange.num_ranks):
            sender, rank = exchange.sender(gpu, source)
            expected = self.load.rows[sender][exchange.goes[sender][:, rank].cuda()]
            if fp8:
                expected = dequantize_rows(quantize_rows(expected), expected.size(1), DTYPE)
            begin = exchange.begin(gpu, source)
            if not torch.equal(self.received[begin : begin + len(expected)], expected):
                return False
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", 8), ("tokens", 4096), ("hidden", 7168), ("experts", 256), ("topk", 8)):
        parser.add_argument(f"--{name}", type=positive, default=default)
    parser.add_argument("--num-sms", type=positives, default=[24])
    parser.add_argument("--repeats", type=positive, default=12)
    args = parser.parse_args()
    use_gpu_of_rank()
    dist.init_process_group("cpu:gloo,cuda:nccl")
    gpu, symmetric = dist.get_rank(), SymmetricArena.of(None)
    load = draw(args, gpu, dist.get_world_size())
    regions: dict[bool, tuple[Layout, Region]] = {}
    for fp8 in (False, True):
        sizes: dict[str, Any] = {"num_ranks": args.ranks, "capacity": args.tokens, "hidden_size": args.hidden}
        layout = Layout(**sizes, topk=args.topk, code_dtype=torch.float8_e4m3fn if fp8 else None)
        regions[fp8] = (layout, symmetric.reserve(layout.symmetric_bytes, "stand-in"))
    for title, name, fp8 in KINDS:
        for num_sms in args.num_sms:
            regions[fp8][1].local.zero_()
            kernel = Kernel(load, *regions[fp8], name)
            times = torch.tensor([kernel.microseconds(num_sms) for _ in range(1 + args.repeats)])
            dist.all_reduce(times, dist.ReduceOp.MAX)
            wrong = torch.tensor([float(not kernel.is_right(fp8))])
            dist.all_reduce(wrong)
            if gpu == 0:
                least, median, most = times[1:].quantile(torch.tensor([0.0, 0.5, 1.0])).tolist()
                print(
                    f"{title}, {args.ranks} ranks, {num_sms} SMs: {median:.1f} us ({least:.1f} to {most:.1f}), "
                    f"GPUs that are wrong: {int(wrong)}",
                    flush=True,
                )
    os._exit(0)


if __name__ == "__main__":
    main()
