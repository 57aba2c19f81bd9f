"""One CUDA graph of a backend's step, replayed with other routing and rows; what tests of several backends share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tests.dispatch.backend_cases import Case, Setting, expected_output, make_setting, prepare_args

ROUTINGS = ("random", "one_rank", "masked", "none", "one_expert", "repeated")
CASE = Case(tokens=(8, 3, 5), dtype=torch.bfloat16, hidden_size=256)
# Of (setting, args of prepare, output): the step, which leaves its output there.
MakeStep = Callable[[Setting, tuple[Any, ...], torch.Tensor], Callable[[], None]]


def capture(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph of the step, which runs once before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def check_replays(rank: int, world_size: int, make_step: MakeStep, code_dtype: torch.dtype | None) -> int:
    """Replays one graph with each routing, twice; how many there were."""
    settings = [
        make_setting(replace(CASE, code_dtype=code_dtype, routing=routing, seed=seed), rank, world_size)
        for seed, routing in enumerate(ROUTINGS)
    ]
    args = prepare_args(settings[0], "cuda")
    rows, weights, ids = args[:3]
    output = torch.empty_like(rows)
    graph = capture(make_step(settings[0], args, output))
    for setting in settings:
        inputs = setting.inputs[rank]
        for there, new in ((rows, inputs.rows), (ids, inputs.ids), (weights, inputs.weights)):
            there.copy_(new)
        for _ in range(2):
            output.fill_(float("nan"))
            graph.replay()
            assert torch.equal(output.cpu(), expected_output(setting, world_size)), setting.case
    return len(settings)


def expert_ids(setting: Setting, device: torch.device) -> torch.Tensor:
    """f32 `[El]`: the id of each local expert."""
    ids = torch.zeros(setting.config.num_local_experts)
    for expert_id, local in setting.local.items():
        ids[local] = expert_id
    return ids.to(device)


def batched_results(ids: torch.Tensor, batch: torch.Tensor, num_rows: torch.Tensor) -> torch.Tensor:
    """What the batched experts `ids` would leave of `[El, rows, K]`, NaN behind `num_rows` `[El]`, as a graph can."""
    factor, term = (1.0 + ids / 8.0)[:, None, None], ids[:, None, None]
    held = torch.arange(batch.size(1), device=batch.device) < num_rows[:, None]
    return torch.where(held[:, :, None], (batch.float() * factor + term).to(batch.dtype), float("nan"))
