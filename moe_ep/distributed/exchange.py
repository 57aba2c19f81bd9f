"""Small messages between the ranks of a group on the CPU, with a deadline and errors that name the failed ranks.

- `gather_texts`: through the store of the rendezvous. It needs no connections and reaches ranks of any group, and it
  takes milliseconds: for what is set up once. Answers that never change are asked for once (`answers_of_ranks`).
- `Exchange`: a few whole numbers, again and again. Ranks of one machine use shared memory, which takes microseconds
  where a gloo collective takes hundreds of them; ranks on several use gloo connections of their own.

All messages are text or numbers; nothing is unpickled. Each call is a collective step of the ranks.
"""

from __future__ import annotations

import mmap
import os
import secrets
import stat
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist

from moe_ep import env
from moe_ep.distributed.failure_detection import FailureDetector, deadline_of
from moe_ep.distributed.liveness import machine
from moe_ep.distributed.plain_data import decode, encode
from moe_ep.distributed.store import (
    call_in_thread,
    close_at_exit,
    delete_text,
    get_text,
    name_in_store,
    rendezvous_store,
    set_text,
)
from moe_ep.errors import DispatchTimeoutError, rank_list

_VALUE_BITS = 32
_NONCE_BYTES = 16

_counts: Counter[str] = Counter()
# Characters of this rank's part of the last exchange of each name.
_lengths: dict[str, int] = {}
# The answers of a group's ranks, by question.
_answers: WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, tuple[Any, ...]]] = WeakKeyDictionary()
# The exchanges by which the ranks of a group learn of the largest number of tokens.
_exchanges: WeakKeyDictionary[dist.ProcessGroup, Exchange] = WeakKeyDictionary()


def gather_texts(
    name: str,
    text: str = "",
    group: dist.ProcessGroup | None = None,
    *,
    ranks: Sequence[int] | None = None,
    timeout_s: float | None = None,
) -> list[str]:
    """The texts of the group's ranks, in their order.

    Args:
        name: identifies the exchange; the n-th exchange of a name on one rank is the n-th on every other.
        ranks: the ranks of the group that take part, including this one; None for all.
        timeout_s: how long to wait for the others; None for `deadline_of` the group.

    Raises:
        DispatchTimeoutError: ranks did not come; its `ranks` holds their numbers in the group.
    """
    group = group or dist.distributed_c10d._get_default_group()
    detector, store = FailureDetector.of(group), rendezvous_store()
    members = range(detector.size) if ranks is None else ranks
    timeout_s = deadline_of(group) if timeout_s is None else timeout_s
    prefix = f"moe_ep/exchange/{name_in_store(group)}/{name}"
    if ranks is not None:
        prefix += f"/{'-'.join(map(str, ranks))}"
    number = _counts[prefix] = _counts[prefix] + 1
    keys = {rank: f"{prefix}/{number}/{rank}" for rank in members}
    set_text(store, keys[detector.rank], text)

    def absent() -> list[int]:
        return [rank for rank, key in keys.items() if not store.check([key])]

    try:
        detector.wait_until(timeout_s, lambda: store.check(list(keys.values())), absent)
    except RuntimeError as error:
        missing = absent()
        if not missing:
            raise detector.error(f"the ranks did not all come to {name}", error) from None
        named = sorted(set(detector.dead()).intersection(missing))
        story = "; ".join(f"rank {rank} died (its process ended)" for rank in named)
        if not named:
            with suppress(RuntimeError):
                refusals = {rank: why for rank, why in detector.refusals().items() if rank in missing}
                story, named = detector.give_up(refusals) if refusals else ("", [])
        raise DispatchTimeoutError(
            f"{name}: {story or f'{rank_list(missing)} did not come within {timeout_s:g} s'}; every rank of the group "
            f"must make the same layers and backends in the same order",
            named or missing,
        ) from None
    found = [get_text(store, key) for key in keys.values()]
    # A rank in this exchange has read all texts of the previous one.
    with suppress(RuntimeError):
        delete_text(store, f"{prefix}/{number - 1}/{detector.rank}", _lengths.get(prefix, 0))
    _lengths[prefix] = len(text)
    return found


def gather_values(name: str, value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The values of the group's ranks (`moe_ep.distributed.plain_data`), in their order; as `gather_texts`."""
    texts = gather_texts(name, encode(value).decode(), group)
    return [decode(text.encode()) for text in texts]


def gather_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of the default group's ranks, in their order, all of one shape and dtype.

    Raises:
        DispatchTimeoutError: a rank failed, or did not come before the deadline; on the CPU.
    """
    group = dist.distributed_c10d._get_default_group()
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    if tensor.is_cuda:
        dist.all_gather(gathered, tensor)
        return gathered
    finish_step(lambda: dist.all_gather(gathered, tensor, async_op=True), group, "tensors")
    return gathered


def finish_step(begin: Callable[[], dist.Work], group: dist.ProcessGroup, what: str) -> None:
    """Begins a collective step of the group on the CPU, and waits for it.

    Args:
        what: as in `Exchange.gather`.

    Raises:
        DispatchTimeoutError: a rank failed, or did not come before the deadline.
    """
    detector, deadline = FailureDetector.of(group), deadline_of(group)
    detector.take_part()
    try:
        detector.wait_for(begin(), deadline)
    except RuntimeError as error:
        raise _not_exchanged(detector, what, deadline, error) from None


def check_agreement(name: str, settings: Mapping[str, object], group: dist.ProcessGroup | None = None) -> None:
    """Checks that all ranks have the same settings.

    Raises:
        ValueError: they differ; the message is the same on every rank, and names what differs and where.
        DispatchTimeoutError: a rank did not come.
    """
    told = gather_values(name, {key: str(value) for key, value in settings.items()}, group)
    differences = []
    for key in dict.fromkeys(key for of_rank in told for key in of_rank):
        values: dict[str, list[int]] = {}
        for rank, of_rank in enumerate(told):
            values.setdefault(of_rank.get(key, "nothing"), []).append(rank)
        if len(values) > 1:
            who = ", ".join(f"{value} on rank {' '.join(map(str, holders))}" for value, holders in values.items())
            differences.append(f"{key} is {who}")
    if differences:
        raise ValueError(f"{name}: the ranks are configured differently: {'; '.join(differences)}; make them the same")


def answers_of_ranks(question: Hashable, mine: Any, process_group: dist.ProcessGroup | None = None) -> tuple[Any, ...]:
    """The answers of the group's ranks to a question, by rank; when it is first asked, all ranks must call it.

    Args:
        question: the same on every rank; of a tuple, the first item says its kind. A rank's answer never changes.
        mine: this rank's answer, as `gather_values` takes it.
    """
    group = process_group or dist.distributed_c10d._get_default_group()
    known = _answers.setdefault(group, {})
    if question not in known:
        kind = question[0] if isinstance(question, tuple) else question
        known[question] = tuple(gather_values(f"question {kind}", mine, group))
    return known[question]


def this_host() -> str:
    """`machine`, followed by a number if MOE_EP_RANKS_PER_HOST divides one machine into several hosts."""
    ranks_per_host = env.RANKS_PER_HOST.get()
    return f"{machine()}#{dist.get_rank() // ranks_per_host}" if ranks_per_host else machine()


def hosts_of(process_group: dist.ProcessGroup | None = None) -> tuple[str, ...]:
    """The host of each of the group's ranks; on first use all ranks must call it."""
    if not (dist.is_available() and dist.is_initialized()):
        return (machine(),)
    return answers_of_ranks(("host", env.RANKS_PER_HOST.get()), this_host(), process_group)


def num_hosts(process_group: dist.ProcessGroup | None = None) -> int:
    """The number of machines that the group's ranks run on; on first use all ranks must call it."""
    return len(set(hosts_of(process_group)))


class Exchange(ABC):
    """A repeated exchange of whole numbers between all ranks; every rank must call it equally often.

    Args:
        timeout_s: deadline of every exchange.
    """

    def __init__(self, detector: FailureDetector, timeout_s: float) -> None:
        self.rank, self.size, self.timeout_s = detector.rank, detector.size, timeout_s
        self._detector = detector

    def gather(self, what: str, values: Sequence[int]) -> list[list[int]]:
        """The values of every rank, by rank: as many on each, from 0 to 2^32 - 1.

        Args:
            what: for the message, completes "the ranks could not exchange".

        Raises:
            DispatchTimeoutError: a rank failed, or did not answer before the deadline.
        """
        try:
            return self.table(values)
        except RuntimeError as error:
            raise _not_exchanged(self._detector, what, self.timeout_s, error) from None

    @abstractmethod
    def table(self, values: Sequence[int]) -> list[list[int]]:
        """As `gather`, with a RuntimeError where that has a DispatchTimeoutError."""


def open_exchange(group: dist.ProcessGroup, width: int) -> Exchange:
    """An exchange of the group's ranks; all of them must call it.

    Args:
        width: number of values in a message.
    """
    detector, deadline = FailureDetector.of(group), deadline_of(group)
    if num_hosts(group) == 1 and (shared := _share_memory(group, detector, width, deadline)) is not None:
        return shared
    gather_texts("connections", "", group)  # so that no rank connects to one that is not there
    name = f"moe_ep/gloo/{name_in_store(group)}"
    _counts[name] += 1
    try:
        connections = GlooExchange(f"{name}/{_counts[name]}", detector, deadline)
    except RuntimeError as error:
        raise _not_exchanged(detector, "their addresses", deadline, error) from None
    close_at_exit(connections)
    gather_texts("connected", "", group)  # so that no rank closes them while another connects
    return connections


def largest_over_ranks(value: int, group: dist.ProcessGroup | None, what: str = "their numbers of tokens") -> int:
    """The largest `value` of the group's ranks, at least 0; `value` itself without a group. All ranks must call it.

    Args:
        what: as in `Exchange.gather`.

    Raises:
        DispatchTimeoutError: a rank failed, or did not answer before the deadline.
    """
    return value if group is None else max(values_over_ranks(value, group, what))


def values_over_ranks(value: int, group: dist.ProcessGroup, what: str = "their numbers of tokens") -> list[int]:
    """`value` of each of the group's ranks, as `largest_over_ranks`."""
    if group not in _exchanges:
        _exchanges[group] = open_exchange(group, 1)
    return [number for (number,) in _exchanges[group].gather(what, [value])]


class SharedMemoryExchange(Exchange):
    """Numbers of the ranks of one machine, in memory with two places for each rank: for even and for odd questions.

    A rank answers a question by writing `question << 32 | value` for each of its values, and waits until all have.
    No answer is overwritten before it was read: a rank that answers question q + 2 has seen all answers to q + 1, and
    every rank gave its own only after it had read those to q.

    Args:
        address: of a `shared_file` of these sizes.
        width: number of values in an answer.
        num_questions: questions are numbered anew from 0 after so many; even.

    Raises:
        OSError: the file is not at its path, as in another PID namespace; whatever is there remains unchanged.
    """

    def __init__(
        self, address: str, detector: FailureDetector, width: int, timeout_s: float, num_questions: int = 1 << 31
    ) -> None:
        super().__init__(detector, timeout_s)
        path, _, nonce = address.rpartition(" ")
        num_answers = 2 * self.size * width
        self._memory = _map_shared(path, num_answers * np.dtype(np.int64).itemsize, bytes.fromhex(nonce))
        self._answers = np.frombuffer(self._memory, np.int64, num_answers).reshape(2, self.size, width)
        self._question, self._num_questions = 0, num_questions

    @staticmethod
    @contextmanager
    def shared_file(size: int, width: int) -> Iterator[str]:
        """Makes a file in this process's memory, which ranks share; OSError if there is no space.

        It holds zeros and a nonce. Yields its address: the path and the nonce, by which ranks recognize the file.
        """
        nonce, handle = secrets.token_bytes(_NONCE_BYTES), os.memfd_create("moe_ep")
        with os.fdopen(handle, "wb") as file:
            file.write(bytes(2 * size * width * np.dtype(np.int64).itemsize) + nonce)
            file.flush()
            yield f"/proc/{os.getpid()}/fd/{handle} {nonce.hex()}"

    def table(self, values: Sequence[int]) -> list[list[int]]:
        self._detector.take_part()
        question = self._question = (self._question + 1) % self._num_questions
        answers = self._answers[question % 2]
        answers[self.rank] = [question << _VALUE_BITS | value for value in values]

        def missing() -> list[int]:
            return (answers >> _VALUE_BITS != question).any(axis=1).nonzero()[0].tolist()

        self._detector.wait_until(self.timeout_s, lambda: bool((answers >> _VALUE_BITS == question).all()), missing)
        return (answers & (1 << _VALUE_BITS) - 1).tolist()


class GlooExchange(Exchange):
    """Exchanges numbers and tensors over its own gloo connections, independently of the model's.

    Args:
        prefix: of the addresses in the store; the same on every rank, never used twice.

    Raises:
        RuntimeError: the ranks did not all connect before the deadline.
    """

    def __init__(self, prefix: str, detector: FailureDetector, timeout_s: float) -> None:
        super().__init__(detector, timeout_s)
        store, timeout = dist.PrefixStore(prefix, rendezvous_store()), timedelta(seconds=timeout_s)
        # The constructor does not notice the death of a rank. The group is not registered with torch.distributed, where
        # one of some ranks cannot be destroyed and made again.
        connecting: Future[Any] = call_in_thread(
            "moe_ep-connect", lambda: dist.ProcessGroupGloo(store, detector.rank, detector.size, timeout)
        )
        detector.wait_until(timeout_s, connecting.done)
        with detector.waiting(timeout_s):
            self.group: dist.ProcessGroup | None = connecting.result()

    def start(self, begin: Callable[[dist.ProcessGroup], dist.Work]) -> None:
        """Runs a collective step of the connections; RuntimeError if it fails or is late, or if a rank has failed."""
        if self.group is None:
            raise RuntimeError("the connections are closed")
        self._detector.take_part()
        self._detector.wait_for(begin(self.group), self.timeout_s)

    def table(self, values: Sequence[int]) -> list[list[int]]:
        """Any values of int64; RuntimeError as `start`."""
        mine = torch.tensor(list(values), dtype=torch.int64, device="cpu")
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        self.start(lambda group: group.allgather([rows], [mine]))
        return [row.tolist() for row in rows]

    def close(self) -> None:
        """Ends the connections; exchanges of ranks that have not closed their ends fail at once."""
        self.group = None


def _share_memory(
    group: dist.ProcessGroup, detector: FailureDetector, width: int, timeout_s: float
) -> SharedMemoryExchange | None:
    """None if the ranks cannot share memory, though their hosts have one name."""
    with ExitStack() as stack:
        made, exchange = "", None
        with suppress(OSError):  # the others learn of a failure by the empty address
            if detector.rank == 0:
                made = stack.enter_context(SharedMemoryExchange.shared_file(detector.size, width))
        address = gather_texts("shared memory", made, group)[0]
        with suppress(OSError, ValueError):
            exchange = SharedMemoryExchange(address, detector, width, timeout_s) if address else None
        is_shared = "" not in gather_texts("shared memory is open", "" if exchange is None else "open", group)
    return exchange if is_shared else None


def _map_shared(path: str, num_bytes: int, nonce: bytes) -> mmap.mmap:
    """Maps a file of so many bytes and this nonce; OSError, without a change to it, if another file is at the path."""
    # O_PATH does not open the file itself: of a pipe or a device, that could have effects.
    handle = os.open(path, os.O_PATH)
    try:
        # By this path it is the same file each time, even if the other process closes its own.
        own, found = f"/proc/self/fd/{handle}", os.fstat(handle)
        is_shared = stat.S_ISREG(found.st_mode) and found.st_size == num_bytes + len(nonce)
        if is_shared:
            with open(own, "rb") as file:
                is_shared = os.pread(file.fileno(), len(nonce), num_bytes) == nonce
        if not is_shared:
            raise FileNotFoundError(f"{path} is another file here than on the rank that made it")
        with open(own, "r+b") as file:
            return mmap.mmap(file.fileno(), 0)
    finally:
        os.close(handle)


def _not_exchanged(detector: FailureDetector, what: str, timeout_s: float, cause: RuntimeError) -> DispatchTimeoutError:
    story = f"the ranks could not exchange {what} (EP rank {detector.rank}, deadline {timeout_s:g} s)"
    return detector.error(story, f"{cause}; end the process, or make the group anew")
