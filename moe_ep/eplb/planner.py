"""From the counts of a window to a load report and, where it pays, a plan.

`PlannerProcess` plans in a process of its own, so that a second of planning does not hold up the interpreter that
serves. The two talk over pipes: a line of JSON, then the arrays' bytes. Requests carry a window of counts and the
placement, answers the plan, or why there is none.
"""

from __future__ import annotations

import json
import math
import os
import select
import subprocess
import sys
import time
from dataclasses import asdict
from typing import IO, Any

import numpy as np
import torch

from moe_ep.eplb.config import EplbConfig
from moe_ep.eplb.events import LoadReport
from moe_ep.eplb.policy.maps import Array
from moe_ep.eplb.rebalance import rebalance_experts
from moe_ep.eplb.recorder import balancedness


def measure_load(counts: torch.Tensor, num_ranks: int, step: int) -> LoadReport:
    """What a window says.

    Args:
        counts: int64 `[S, L, P]` of physical experts, summed over ranks, slots in rank order.
    """
    slots = counts.unflatten(2, (num_ranks, -1))
    per_rank = slots.sum(dim=3)
    busiest = per_rank.amax(dim=2).double()
    active = (slots > 0).sum(dim=3).amax(dim=2).double()
    return LoadReport(
        step=step,
        num_steps=counts.size(0),
        balancedness=balancedness(per_rank.flatten(0, 1)),
        layer_balancedness=tuple(balancedness(per_rank[:, layer]) for layer in range(counts.size(1))),
        max_tokens=float(busiest.mean()) if busiest.numel() else 0.0,
        mean_tokens=float(per_rank.double().mean()) if per_rank.numel() else 0.0,
        active_experts=float(active.mean()) if active.numel() else 0.0,
    )


def logical_counts(counts: torch.Tensor, placement: Array, num_experts: int) -> torch.Tensor:
    """Counts of logical experts int64 `[S, L, E]`, from those of physical ones `[S, L, P]` and their placement."""
    result = counts.new_zeros(*counts.shape[:2], num_experts)
    return result.scatter_add_(2, torch.from_numpy(placement).expand_as(counts), counts)


def make_plan(
    counts: torch.Tensor, placement: Array, num_experts: int, num_ranks: int, config: EplbConfig
) -> tuple[Array | None, str]:
    """The placement to go to from the counts of a window int64 `[S, L, P]`: int64 `[L, P]`, or None and why not."""
    load = measure_load(counts, num_ranks, 0)
    if load.mean_tokens == 0:
        return None, "no tokens in the window"
    # For other objectives only the planner can tell whether the layers are even.
    if config.objective == "tokens" and load.balancedness >= config.rebalance_below:
        return None, f"balancedness {load.balancedness:.3f} is not below {config.rebalance_below:g}"
    window = logical_counts(counts, placement, num_experts)
    plan = rebalance_experts(
        window.sum(dim=0),
        placement.shape[1],
        config.num_groups,
        config.num_nodes,
        num_ranks,
        config.policy,
        old_physical_to_logical=placement,
        window=window,
        objective=config.objective,
        rebalance_below=config.rebalance_below,
        min_gain=config.min_gain,
        move_cost=config.move_cost,
        refine=config.refine,
    ).physical_to_logical.numpy()
    if np.array_equal(plan, placement):
        return None, "no layer gains enough"
    return plan, ""


class PlannerProcess:
    """A child that plans; it ends with this process, or with `close`.

    Args:
        limit_s: seconds that a plan may take.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        environment = os.environ | {
            # As found here, also from a bare checkout; no GPU, and one core.
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from moe_ep.eplb.planner import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            bufsize=0,
            # Interrupts at the terminal are for the one that serves; this one ends when its pipe does.
            start_new_session=True,
        )
        if self.process.stdin is not None:
            # A write takes what the pipe has room for, however long the child takes to read.
            os.set_blocking(self.process.stdin.fileno(), False)

    def make_plan(
        self,
        counts: torch.Tensor,
        placement: Array,
        num_experts: int,
        num_ranks: int,
        config: EplbConfig,
    ) -> tuple[Array | None, str]:
        """Calls `moe_ep.eplb.planner.make_plan` in the process, for a window int `[S, L, P]`.

        Raises:
            TimeoutError: it takes too long.
            RuntimeError: the process has ended.
        """
        about = {"num_experts": num_experts, "num_ranks": num_ranks, "config": asdict(config)}
        stdin, stdout = self.process.stdin, self.process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("the planning process was started without pipes")
        deadline = time.monotonic() + self._limit_s
        try:
            _write(stdin, about, counts.to(torch.int32).numpy(), placement, deadline=deadline)
            answer, arrays = _read(stdout, deadline)
        except TimeoutError:
            raise TimeoutError(f"the planning process did not answer within {self._limit_s:g} s") from None
        except (OSError, EOFError):
            code = self.process.wait()
            raise RuntimeError(f"the planning process ended with exit code {code}") from None
        return (arrays[0] if arrays else None), answer["reason"]

    def give_up(self) -> None:
        """Ends a `make_plan` that waits for its answer; called by another thread, and `close` comes next."""
        self.process.kill()

    def close(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def _write(pipe: IO[bytes], about: dict[str, Any], *arrays: Array, deadline: float | None = None) -> None:
    """Raises TimeoutError where the other end does not read before the deadline (time.monotonic)."""
    arrays = tuple(np.ascontiguousarray(array) for array in arrays)
    header = about | {"arrays": [[array.dtype.str, list(array.shape)] for array in arrays]}
    for data in (json.dumps(header).encode() + b"\n", *(array.tobytes() for array in arrays)):
        left = memoryview(data)
        while len(left):
            _wait(pipe, select.POLLOUT, deadline)
            left = left[pipe.write(left) or 0 :]


def _read(pipe: IO[bytes], deadline: float | None = None) -> tuple[dict[str, Any], list[Array]]:
    """Raises TimeoutError where the other end does not write before the deadline, EOFError where it is gone."""
    header = json.loads(_read_line(pipe, deadline))
    arrays = []
    for dtype, shape in header.pop("arrays"):
        data = bytearray(np.dtype(dtype).itemsize * math.prod(shape))
        view = memoryview(data)
        while len(view):
            _wait(pipe, select.POLLIN, deadline)
            size = pipe.readinto(view)  # type: ignore[attr-defined]
            if not size:
                raise EOFError
            view = view[size:]
        arrays.append(np.frombuffer(data, dtype=dtype).reshape(shape))
    return header, arrays


def _wait(pipe: IO[bytes], event: int, deadline: float | None) -> None:
    """Returns when the pipe is ready or its other end is gone; TimeoutError at the deadline."""
    # Unlike select, for any number of open files.
    poll = select.poll()
    poll.register(pipe, event)
    if not poll.poll(None if deadline is None else max(deadline - time.monotonic(), 0) * 1e3):
        raise TimeoutError


def _read_line(pipe: IO[bytes], deadline: float | None) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        _wait(pipe, select.POLLIN, deadline)
        byte = pipe.read(1)
        if not byte:
            raise EOFError
        line += byte
    return line


def main() -> None:
    """Answers requests until the pipe is closed."""
    os.nice(5)
    torch.set_num_threads(1)
    requests, answers = os.fdopen(0, "rb", buffering=0), os.fdopen(os.dup(1), "wb", buffering=0)
    # What a library prints must not get between answers.
    os.dup2(2, 1)
    while True:
        try:
            about, (counts, placement) = _read(requests)
        except EOFError:
            return
        window = torch.from_numpy(counts.astype(np.int64))
        config = EplbConfig(**about["config"])
        plan, reason = make_plan(window, placement, about["num_experts"], about["num_ranks"], config)
        try:
            _write(answers, {"reason": reason}, *([] if plan is None else [plan]))
        except BrokenPipeError:
            return
