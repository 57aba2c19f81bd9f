"""Which of a layer's calls are captured, and for how long; what the graphs compute is tested on GPUs."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from moe_ep.layer import replay
from moe_ep.layer.replay import EAGER_CALLS, MOST_KINDS, CallGraphs, bucket


class Place:
    """Stands in for a stream: its graphs are the functions, and it keeps what was done."""

    stream = 7

    def __init__(self) -> None:
        self.done: list[str] = []

    def capture(
        self, function: Callable[..., Any], inputs: tuple[torch.Tensor, ...], num_rows: int | None
    ) -> tuple[Any, Any]:
        self.done.append("capture")
        shapes = [tensor.shape if num_rows is None else (num_rows, *tensor.shape[1:]) for tensor in inputs]
        mask = None if num_rows is None else torch.zeros(num_rows, dtype=torch.bool)
        tensors = tuple(tensor.new_zeros(shape) for tensor, shape in zip(inputs, shapes, strict=True))
        graph: Any = function
        made = replay.CapturedCall(graph, replay.Inputs(tensors, mask), tensors[0])
        return self.run(made, inputs), made

    def replay(self, captured: Any, inputs: tuple[torch.Tensor, ...]) -> Any:
        self.done.append("replay")
        return self.run(captured, inputs)

    @staticmethod
    def run(captured: Any, inputs: tuple[torch.Tensor, ...]) -> Any:
        held = captured.inputs
        held.write(inputs)
        return captured.graph(held.mask, *held.tensors)[: len(inputs[0])]


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Place:
    made = Place()
    monkeypatch.setattr(replay, "stream_graphs", lambda device: made)
    return made


def add(mask: torch.Tensor | None, *inputs: torch.Tensor) -> torch.Tensor:
    total = torch.add(*inputs)
    return total if mask is None else torch.where(mask[:, None], total, torch.nan)


def call(graphs: CallGraphs, *inputs: torch.Tensor, kernels: object = None, **options: Any) -> None:
    assert torch.equal(graphs.run(add, inputs, kernels, **{"depends_on": ()} | options), torch.add(*inputs))


def captured(depends_on: tuple[object, ...] = ()) -> CallGraphs:
    """With a graph of calls of two rows."""
    graphs = CallGraphs()
    for _ in range(EAGER_CALLS + 1):
        call(graphs, *rows(2), depends_on=depends_on)
    return graphs


def rows(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(tokens, 3).to(dtype), torch.rand(tokens, 3).to(dtype)


def test_a_call_is_captured_when_its_kind_has_come_often_enough(place: Place) -> None:
    graphs = CallGraphs()
    for tokens in (2, 5) * EAGER_CALLS:
        call(graphs, *rows(tokens))
    call(graphs, *rows(2, torch.float64))
    call(graphs, *rows(2), kernels="another kernel")
    assert place.done == []
    call(graphs, *rows(2))
    assert place.done == ["capture"]
    call(graphs, *rows(2))
    call(graphs, *rows(5))
    call(graphs, *rows(5))
    assert place.done == ["capture", "replay", "capture", "replay"]


def test_calls_that_are_filled_up_share_a_graph(place: Place) -> None:
    """Rows that are not there are left out, whatever calls before had there."""
    graphs, others = CallGraphs(), CallGraphs()
    for tokens in (8, 5, 7, 8, 6, 0, 8, 5, 3):
        for each in (graphs, others):
            call(each, *rows(tokens), num_rows=8)
    assert place.done == ["capture"] * 2 + ["replay"] * 8
    call(graphs, *rows(5), num_rows=6)
    call(graphs, *rows(8))
    assert len(place.done) == 10


def test_the_numbers_of_rows_that_calls_are_filled_up_to() -> None:
    numbers = [*range(3000)]
    found = [bucket(number) for number in numbers]
    assert found[:10] == [1, 1, 2, 3, 4, 6, 6, 8, 8, 12]
    assert found == sorted(found) and all(number <= most for number, most in zip(numbers, found, strict=True))
    assert all(bucket(most) == most <= max(1.5 * number, 1) for number, most in zip(numbers, found, strict=True))


def test_calls_of_the_wrong_shape_run_as_they_are(place: Place) -> None:
    graphs = captured()
    with pytest.raises(RuntimeError, match="size"):
        graphs.run(add, (torch.rand(2, 3), torch.rand(2, 2)), kernels=None, depends_on=())


def test_graphs_end_with_what_they_were_made_for(place: Place) -> None:
    graphs = captured(depends_on=(1,))
    for address in (2, 2, *[1] * EAGER_CALLS):
        call(graphs, *rows(2), depends_on=(address,))
    assert place.done == ["capture"]
    call(graphs, *rows(2), depends_on=(1,))
    assert place.done == ["capture", "capture"]
    graphs.clear()
    call(graphs, *rows(2), depends_on=(1,))
    assert place.done == ["capture", "capture"]


def test_a_layer_keeps_so_many_graphs(place: Place) -> None:
    graphs = CallGraphs()
    for tokens in [*range(1, 41)] * (EAGER_CALLS + 1):
        call(graphs, *rows(tokens))
    assert place.done.count("capture") == MOST_KINDS
    call(graphs, *rows(1))
    assert place.done[-1] == "replay"


def test_a_call_that_cannot_be_captured_runs_eagerly(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And no other call is tried, of whatever layer."""
    monkeypatch.setattr(replay, "is_possible", True)
    graphs, others = captured(), CallGraphs()
    assert place.done == ["capture"]
    monkeypatch.setattr(Place, "capture", refuse)
    for _ in range(EAGER_CALLS + 3):
        call(graphs, *rows(5))
        call(others, *rows(5))
    assert place.done == ["capture", "refused"]
    assert len(caplog.messages) == 1 and "not permitted" in caplog.text
    call(graphs, *rows(2))
    assert place.done[-1] == "replay"


def refuse(
    self: Place, function: Callable[..., Any], inputs: tuple[torch.Tensor, ...], num_rows: int | None
) -> tuple[Any, Any]:
    self.done.append("refused")
    return function(None, *inputs), RuntimeError("operation not permitted when stream is capturing")


def test_calls_that_other_ranks_take_part_in_run_once_each(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are captured too; replays run inside of what the backend says, which may raise."""

    def function(mask: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
        place.done.append("call")
        return x

    @contextmanager
    def around() -> Iterator[None]:
        place.done.append("enter")
        yield
        place.done.append("exit")

    monkeypatch.setattr(replay, "is_possible", True)
    graphs, one_row = CallGraphs(), (torch.rand(1, 3),)
    for _ in range(EAGER_CALLS + 2):
        graphs.run(function, one_row, kernels=None, depends_on=(), around=around())
    assert place.done == ["call"] * EAGER_CALLS + ["capture", "call", "enter", "replay", "call", "exit"]
    monkeypatch.setattr(Place, "capture", refuse)
    for _ in range(EAGER_CALLS):
        graphs.run(function, one_row, kernels="another", depends_on=(), around=around())
    with pytest.raises(RuntimeError, match="MOE_EP_REPLAY_MAX_TOKENS=0.*not permitted"):
        graphs.run(function, one_row, kernels="another", depends_on=(), around=around())


def test_copies_begin_with_no_graphs(place: Place) -> None:
    graphs = captured()
    for other in (copy.deepcopy(graphs), pickle.loads(pickle.dumps(graphs))):
        place.done.clear()
        call(other, *rows(2))
        assert place.done == []
