"""Coordinates the passes of ranks that have requests of their own.

Every pass of the model through its layers is one step of all ranks. Before it, ranks exchange on the CPU how many
tokens each of them has. A rank without requests calls `serve`: it computes its experts for the others' tokens until no
rank has any.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from moe_ep.distributed.exchange import open_exchange
from moe_ep.errors import ConfigError, DispatchTimeoutError

if TYPE_CHECKING:
    from moe_ep.checkpoint.spec import MoEModelSpec
    from moe_ep.eplb.manager import EPLBManager
    from moe_ep.layer.elastic import ElasticExperts


# Numbers that a rank tells the others before a step: three of its caller's, and whether it has read what is lost.
_WIDTH = 4

# Kept as long as their groups: ranks let go of models at different times, and must find the same one.
_schedulers: WeakKeyDictionary[dist.ProcessGroup, StepScheduler] = WeakKeyDictionary()


@dataclass(frozen=True)
class Step:
    """The ranks' agreement on one pass.

    Attributes:
        num_tokens: of each rank, by rank.
        can_replay: whether every rank has a CUDA graph of this pass.
    """

    num_tokens: tuple[int, ...]
    can_replay: bool = False

    @property
    def most_tokens(self) -> int:
        return max(self.num_tokens)


class StepCoordinator:
    """One model's steps over its EP ranks, which make the models of their group in one order.

    Args:
        process_group: the EP ranks; None for this process alone.

    Attributes:
        current: the step under way, None between steps.
        scheduler: of the models that are parallelized over the same ranks.
        eplb: balances the experts between steps, or None.
        elastic: places the experts anew when the ranks change, or None where they do not.
        source: the spec and the config of the checkpoint that the model came from; None for a model that was given.
        num_updates: how often weights beside the experts were written in place, for what is derived from them.
    """

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self.scheduler = StepScheduler.of(process_group)
        self._number = self.scheduler.join(self)
        # Weak references, since the layers keep this: dropping a model frees its memory.
        self._layers: list[weakref.ref[Any]] = []
        self.current: Step | None = None
        self.eplb: EPLBManager | None = None
        self.elastic: ElasticExperts | None = None
        self.source: tuple[MoEModelSpec, dict[str, Any]] | None = None
        self.num_updates = 0
        # Layers that the pass under way has yet to call, and whether it is inside of one.
        self._due: deque[Any] | None = None
        self._inside = False

    def __reduce__(self) -> Any:
        raise ConfigError(
            "a parallelized model cannot be pickled, nor saved by torch.save: a rank holds its own experts "
            "alone; save the model before parallelize"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> StepCoordinator:
        if self.scheduler.size > 1:
            raise ConfigError("a parallelized model cannot be copied; copy it before parallelize")
        return StepCoordinator(None)  # of other layers, which whoever copies them adds; nothing balances them

    def regroup(self, process_group: dist.ProcessGroup | None) -> None:
        """Goes on over other ranks, without balancing, from a step that did not end; a collective call of them."""
        self.end_balancing()
        self.scheduler = StepScheduler.of(process_group)
        self._number = self.scheduler.join(self)
        self.current = self._due = None
        self._inside = False

    @property
    def layers(self) -> list[Any]:
        """The model's `RoutedExperts` in the order in which a pass reaches them."""
        return [layer for there in self._layers if (layer := there()) is not None]

    def add(self, layer: Any) -> None:
        """The layer that a pass reaches next."""
        self._layers.append(weakref.ref(layer))

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank in the current step; 0 outside of steps."""
        return 0 if self.current is None else self.current.num_tokens[self.scheduler.rank]

    def begin(self, num_tokens: int | None) -> Step | None:
        """Agrees on the next step, which `end` ends; None where no rank has tokens. Until it is this model's turn, this
        rank serves in the steps of others.

        Args:
            num_tokens: that this rank brings; None where it only serves.

        Raises:
            DispatchTimeoutError: a rank did not come to the step before the deadline, or as `check` says.
            ConfigError: it is the turn of a model that this rank has dropped.
        """
        while (agreed := self.agree(num_tokens)) is not None:
            model, step = agreed
            if model is self:
                self.current = step
                return step
            model.serve_in(step)
        return None

    def agree(self, num_tokens: int | None) -> tuple[StepCoordinator, Step] | None:
        """The next step of the ranks and the model that it is of; None where no rank has tokens."""
        self.check()
        table = self.scheduler.exchange(0 if num_tokens is None else self._number, num_tokens or 0, 0)
        number = self.scheduler.next_of(row[0] for row in table)
        if number == 0:
            return None
        return self.scheduler.model(number), Step(tuple(row[1] * (row[0] == number) for row in table))

    def check(self) -> None:
        """DispatchTimeoutError where a step that has ended on this rank's GPU waited for another rank in vain."""
        for layer in self.layers:
            layer.check()

    def end(self) -> None:
        """Ends the step under way; experts that have arrived are taken over here."""
        self.current = None
        if self.eplb is not None:
            self.eplb.step()

    def begin_pass(self, num_tokens: int) -> None:
        """`begin` for a pass of the model as a user calls it, which may leave layers out and may fail.

        Until `end_pass` or `fail_pass` this rank serves in the layers that the pass does not call: the other ranks call
        every layer once, in their order.

        Raises:
            ConfigError: the pass is captured in a CUDA graph.
        """
        if self.scheduler.size > 1 and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise ConfigError(
                "a pass of a model over several ranks is captured in a CUDA graph, whose replays would not agree with "
                "the other ranks; run it eagerly (generate_batch: use_cuda_graph=False in its configuration), and "
                "moe_ep captures what it can itself"
            )
        self.begin(num_tokens)
        self._due, self._inside = deque(self.layers) if self.scheduler.size > 1 else None, False

    def end_pass(self) -> None:
        """Ends the step of a pass."""
        try:
            while self._due:
                self._due[0].serve()
        finally:
            self._due = self.current = None
        self.end()

    def fail_pass(self, error: BaseException) -> None:
        """Ends the step of a pass that has raised: as a step in which this rank served from there on, so that whoever
        catches the error may go on. Where a layer has failed, or the user wants no more, the ranks are apart."""
        if isinstance(error, Exception) and not self._inside:
            try:
                self.end_pass()
            except Exception as another:
                error.add_note(f"after that this rank could not serve the other ranks: {another}")
        else:
            self._due = self.current = None

    @contextlib.contextmanager
    def calling(self, layer: Any) -> Iterator[None]:
        """A block in which this rank computes a layer, in a pass of its own or to serve.

        Raises:
            ConfigError: the other ranks do not call the layer now.
        """
        if self._due is None:
            yield
            return
        if layer not in self._due:
            raise ConfigError(
                f"a pass calls the experts of {layer.layer_name} twice, or after those of a later layer; the other "
                f"ranks call those of each layer once, in the layers' order, and so must every pass"
            )
        while self._due[0] is not layer:
            self._due[0].serve()
        self._inside = True
        yield
        self._inside = False
        self._due.popleft()

    def end_balancing(self) -> None:
        """Leaves the experts where they are; a second time does no harm."""
        eplb, self.eplb = self.eplb, None
        if eplb is not None:
            eplb.close()

    @contextlib.contextmanager
    def planned(self, step: Step | None) -> Iterator[None]:
        """A block that is this rank's pass of a step that all ranks know; None for a block without a step."""
        self.current = step
        try:
            yield
        except BaseException:
            self.current = None
            raise
        if step is not None:
            self.end()

    @contextlib.contextmanager
    def pretending(self, num_tokens: int) -> Iterator[None]:
        """A block in which layers take it that a step of `num_tokens` on every rank is under way."""
        before = self.current
        self.current = Step((num_tokens,) * self.scheduler.size)
        try:
            yield
        finally:
            self.current = before

    def pass_without_tokens(self) -> None:
        """This rank's part of a step in which it has no tokens."""
        for layer in self.layers:
            layer.serve()

    def serve_in(self, step: Step) -> None:
        """This rank's part of a step in which it serves."""
        self.check()
        with self.planned(step):
            self.pass_without_tokens()

    def serve(self) -> int:
        """Serves the other ranks until every rank serves; returns the steps it took part in, of any model."""
        num_steps = 0
        while self._serve_once():
            num_steps += 1
        return num_steps

    def serve_behind_requests(self) -> None:
        """The same at the end of a block of requests. Where other threads of this rank have such blocks, the last one
        serves for all; where one begins meanwhile, its end does."""
        goes_on = True
        while goes_on:
            with self.scheduler.serving() as mine:
                goes_on = mine and self._serve_once()

    def _serve_once(self) -> bool:
        """Takes part in the ranks' next step; False where every rank serves."""
        with self.scheduler.lock:
            agreed = self.agree(None)
            if agreed is not None:
                model, step = agreed
                model.serve_in(step)
        return agreed is not None


class StepScheduler:
    """Orders the steps of the models that are parallelized over one process group, as a draft model and its target.

    Before a step, each rank says which model it has a pass of. The ranks make the step of one of these models together,
    and a rank that wants another one serves in it and asks again. Making a scheduler is a collective call.

    Args:
        process_group: None for this process alone.

    Attributes:
        lock: held by the thread that makes a step. Ranks make their collective calls in one order, and no rank knows
            which thread of another has a pass to make, so the threads of a rank make one step at a time.
        rank, size: of this process in the group.
        peers: by which the ranks exchange numbers; None for this process alone.
    """

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self.lock = threading.RLock()
        self.peers = None if process_group is None else open_exchange(process_group, _WIDTH)
        self.rank, self.size = (0, 1) if self.peers is None else (self.peers.rank, self.peers.size)
        # Open `requests` blocks of this rank's threads, and whether a thread serves for all of them after the last.
        self._blocks, self._is_served, self._counting = 0, False, threading.Lock()
        # Whether a block has ended that leaves serving to a later one.
        self._is_owed = False
        # Weak references, so that dropping a model frees its memory.
        self._models: list[weakref.ref[StepCoordinator]] = []
        self._last = 0

    @staticmethod
    def of(process_group: dist.ProcessGroup | None) -> StepScheduler:
        """The scheduler of the group; a new one for a model of this process alone."""
        if process_group is None:
            return StepScheduler(None)
        scheduler = _schedulers.get(process_group)
        if scheduler is None:
            scheduler = _schedulers[process_group] = StepScheduler(process_group)
        return scheduler

    @contextlib.contextmanager
    def requests(self) -> Iterator[None]:
        """A block in which a thread of this rank makes passes at any time."""
        with self._counting:
            self._blocks += 1
        ended = False
        try:
            yield
            ended = True
        finally:
            with self._counting:
                self._blocks -= 1
                self._is_owed |= ended and self._blocks > 0

    def is_owed(self) -> bool:
        """Whether ended blocks rely on this thread to serve, and no block is open."""
        with self._counting:
            return self._is_owed and not self._blocks

    @contextlib.contextmanager
    def serving(self) -> Iterator[bool]:
        """A block for the next step; yields whether this thread must serve in it for the rank, since no thread has
        requests and no other thread serves."""
        with self._counting:
            mine = not self._blocks and not self._is_served
            self._is_served |= mine
            self._is_owed &= not mine
        try:
            yield mine
        finally:
            with self._counting:
                self._is_served &= not mine

    def join(self, model: StepCoordinator) -> int:
        """Adds a model; returns its number, from 1. Ranks parallelize their models in one order."""
        self._models.append(weakref.ref(model))
        return len(self._models)

    def next_of(self, wanted: Iterable[int]) -> int:
        """The number of the model whose step the ranks make now, of those that they want; 0 if they want none.

        Step order is round robin: the model after that of the last step comes first.
        """
        numbers = set(wanted) - {0}
        if not numbers:
            return 0
        self._last = min(numbers, key=lambda number: (number <= self._last, number))
        return self._last

    def model(self, number: int) -> StepCoordinator:
        """The model of that number; ConfigError if this rank does not have it."""
        model = self._models[number - 1]() if number <= len(self._models) else None
        if model is None:
            raise ConfigError(
                f"another rank makes a pass of the model that was parallelized as number {number} of their process "
                f"group, which this rank has dropped or never parallelized; all ranks parallelize the same models in "
                f"one order, and keep them until all are done"
            )
        return model

    def exchange(self, first: int, second: int, third: int) -> list[list[int]]:
        """Exchanges three numbers from 0 to 2^32 - 1 of every rank, from which ranks plan their next step; by rank.

        Where tokens go without experts that are being read again, and all ranks have read them now, they end that.

        Raises:
            DispatchTimeoutError: a rank did not come to the step before the deadline.
        """
        elastic = [model.elastic for there in self._models if (model := there()) is not None and model.elastic]
        mine = [first, second, third, int(all(experts.has_read for experts in elastic))]
        try:
            told = [mine] if self.peers is None else self.peers.gather("what they bring to the next step", mine)
        except DispatchTimeoutError as error:
            raise DispatchTimeoutError(
                f"{error}; a rank that has no pass to make serves the others: call moe_ep.serve, or make passes in a "
                f"moe_ep.serving block",
                error.ranks,
            ) from None
        if all(row[3] for row in told):
            for experts in elastic:
                experts.end_skipping()
        return [row[:3] for row in told]
