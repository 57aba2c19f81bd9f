"""From the counts of a window to a load report and, where it pays, a plan.

`PlannerProcess` plans in a process of its own, so that a second of planning does not hold up the interpreter that
serves. The two talk over a socket: a line of JSON, then the bytes of arrays. Requests carry a window of counts int32
`[S, L, P]` and the placement int64 `[L, P]`, answers the plan int64 `[L, P]`, or why there is none.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from io import BufferedReader
from typing import Any

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
    window = counts.new_zeros(*counts.shape[:2], num_experts)
    window.scatter_add_(2, torch.from_numpy(placement).expand_as(counts), counts)
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
        self._socket, of_child = socket.socketpair()
        self._socket.settimeout(limit_s)
        self._answers = self._socket.makefile("rb")
        environment = os.environ | {
            # As found here, also from a bare checkout; no GPU, and one core.
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        with of_child:
            self.process = subprocess.Popen(
                [sys.executable, "-c", "from moe_ep.eplb.planner import main; main()"],
                stdin=of_child.fileno(),
                stdout=2,  # what libraries print there
                env=environment,
                # Interrupts at the terminal are for the process that serves; this one ends with its socket.
                start_new_session=True,
            )

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
        request = {
            "shape": list(counts.shape),
            "num_experts": num_experts,
            "num_ranks": num_ranks,
            "config": asdict(config),
        }
        try:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            self._socket.sendall(counts.to(torch.int32).numpy().tobytes())
            self._socket.sendall(placement.tobytes())
            answer = _read_line(self._answers)
            plan = _read_array(self._answers, np.int64, placement.shape) if answer["made"] else None
        except TimeoutError:
            raise TimeoutError(f"the planning process did not answer within {self._limit_s:g} s") from None
        except (OSError, EOFError):
            code = self.process.wait()
            raise RuntimeError(f"the planning process ended with exit code {code}") from None
        return plan, answer["reason"]

    def give_up(self) -> None:
        """Ends a `make_plan` that waits for its answer; called by another thread, and `close` comes next."""
        self.process.kill()

    def close(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.wait()
        self._answers.close()
        self._socket.close()


def _read_line(file: BufferedReader) -> dict[str, Any]:
    line = file.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    found: dict[str, Any] = json.loads(line)
    return found


def _read_array(file: BufferedReader, dtype: type[np.generic], shape: Sequence[int]) -> Array:
    array = np.empty(shape, dtype=dtype)
    if file.readinto(array.reshape(-1).view(np.uint8).data) < array.nbytes:
        raise EOFError
    return array


def main() -> None:
    """Answers requests until the socket, which is standard input, is closed."""
    os.nice(5)
    torch.set_num_threads(1)
    channel = socket.socket(fileno=0)
    requests = channel.makefile("rb")
    with suppress(EOFError, OSError):
        while True:
            request = _read_line(requests)
            shape = request["shape"]
            window = torch.from_numpy(_read_array(requests, np.int32, shape)).long()
            placement = _read_array(requests, np.int64, shape[1:])
            config = EplbConfig(**request["config"])
            plan, reason = make_plan(window, placement, request["num_experts"], request["num_ranks"], config)
            answer = json.dumps({"made": plan is not None, "reason": reason}).encode() + b"\n"
            channel.sendall(answer if plan is None else answer + plan.tobytes())
