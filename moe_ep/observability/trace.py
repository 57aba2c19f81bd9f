"""One Perfetto trace a rank: every stage of every layer as a named range, kernels below them, ranks aligned in time.

    with trace_to(folder, rank=rank):
        serve()

writes folder/rank-003.json.gz, which ui.perfetto.dev opens; files opened together show the ranks together.
torch.profiler records; stages are NVTX ranges too, for Nsight Systems. Clocks of other hosts are shifted by their
difference from rank 0's right after a barrier.
"""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._profiler import _ExperimentalConfig

from moe_ep.distributed.exchange import gather_texts
from moe_ep.distributed.liveness import machine
from moe_ep.errors import MoeEpError
from moe_ep.observability.stages import Listener, listening

PREFIX = "moe_ep."
_PROCESSES_PER_RANK = 1000


class _Ranges(Listener):
    def __init__(self, nvtx: bool) -> None:
        self._nvtx = nvtx

    def span(self, name: str) -> AbstractContextManager[None]:
        return named_range(name, self._nvtx)


@contextmanager
def named_range(name: str, nvtx: bool = False) -> Iterator[None]:
    """A range `moe_ep.<name>` in traces being recorded; as an NVTX range too, where asked."""
    with torch.profiler.record_function(PREFIX + name):
        if not nvtx:
            yield
            return
        torch.cuda.nvtx.range_push(PREFIX + name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()


@contextmanager
def trace_to(folder: Path | str, *, rank: int) -> Iterator[Path]:
    """Records what happens inside the block; a collective call of the ranks where there are several.

    Yields:
        The file that is written when the block ends, rank-NNN.json.gz in `folder`, which is made where it is missing.

    Raises:
        MoeEpError: the folder cannot be written to, or is full.
    """
    folder = Path(folder)
    with _writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{rank:03}.json.gz"
    on_gpu = torch.cuda.is_available()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    shift_us = clock_difference_us()
    # Experts move on a thread of their own.
    everywhere = _ExperimentalConfig(profile_all_threads=True)
    profiler = torch.profiler.profile(activities=activities, experimental_config=everywhere)
    with profiler as profile, listening(_Ranges(on_gpu)):
        yield path
    # If the profiler cannot write, it reports nothing and may leave temporary files.
    with _writing_to(folder), tempfile.TemporaryDirectory(prefix=f".{path.stem}.", dir=folder) as scratch:
        recorded, aligned = Path(scratch, "recorded.json"), Path(scratch, path.name)
        profile.export_chrome_trace(str(recorded))
        align(recorded, aligned, rank, shift_us)
        aligned.replace(path)


@contextmanager
def _writing_to(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = "the disk may be full" if isinstance(error, FileNotFoundError) else error.strerror
        raise MoeEpError(
            f"no trace can be written to {folder} ({reason}); choose another folder, or record no trace"
        ) from None


def clock_difference_us() -> float:
    """Microseconds that this host's clock is ahead of rank 0's; 0 on rank 0's host, which has the same clock."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return 0.0
    dist.barrier()
    mine = [machine(), time.time_ns()]
    first = json.loads(gather_texts("clocks", json.dumps(mine))[0])
    return 0.0 if mine[0] == first[0] else (mine[1] - first[1]) / 1e3


def align(recorded: Path, path: Path, rank: int, shift_us: float) -> None:
    """Writes the trace with times on rank 0's clock, and processes named and numbered apart from others."""
    trace = json.loads(recorded.read_bytes())
    events = trace["traceEvents"]
    numbers: dict[str, int] = {}
    named = {}
    for event in events:
        if "ts" in event:
            event["ts"] -= shift_us
        if "pid" in event:
            process = str(event["pid"])
            event["pid"] = numbers.setdefault(process, rank * _PROCESSES_PER_RANK + len(numbers))
            if event.get("name") == "process_name":
                named[event["pid"]] = event
    for process, number in numbers.items():
        if number in named:
            named[number]["args"]["name"] = f"rank {rank}: {named[number]['args']['name']}"
        else:
            name = {"name": f"rank {rank}: {process}"}
            events.append({"name": "process_name", "ph": "M", "pid": number, "tid": 0, "args": name})
    # In one piece: json.dump encodes in Python, an item at a time.
    path.write_bytes(gzip.compress(json.dumps(trace).encode(), compresslevel=3))
