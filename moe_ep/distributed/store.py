"""Access to the rendezvous store, through which ranks reach each other when collective steps fail.

A thread of each process polls the store for questions of other ranks, so that a busy rank answers too.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Protocol, TypeVar
from weakref import WeakKeyDictionary, WeakSet, ref

import torch.distributed as dist

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Polling interval of the thread. A wait for an answer must last several times as long.
LOOK_S = 0.5
_CLOSE_S, _ASK_POLL_S = 1.0, 0.02
# The store refuses values of more than 8 MiB; a character is at most 4 bytes.
PART_CHARACTERS = 1 << 20

_names: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()
# The groups so far of each name and store.
_namesakes: Counter[str] = Counter()
_store_ids: WeakKeyDictionary[dist.Store, str] = WeakKeyDictionary()


class Closable(Protocol):
    def close(self) -> None:
        """May be called again."""


class Listener(Protocol):
    def listen(self, store: dist.Store) -> None:
        """Called every `LOOK_S` seconds by the thread; RuntimeError where the store cannot be reached."""


def rendezvous_store() -> dist.Store:
    """The store of the default group's rendezvous, which every rank of every group can reach.

    Raises:
        RuntimeError: there is no default group, or no longer one.
    """
    try:
        return dist.distributed_c10d._get_default_store()
    except ValueError as error:
        raise RuntimeError(str(error)) from None


def name_in_store(group: dist.ProcessGroup) -> str:
    """A group's name for keys in the store, the same on all of its ranks and different from that of any earlier group.

    A group that is made again after all were destroyed has the torch name of the first, and may have its store, as
    under torchrun. A number keeps it from reading what the first one's ranks left there. Every store has an id, by
    which ranks count from 0 in a new one: some of them may be new processes.

    Raises:
        RuntimeError: the store cannot be reached, or there is no default group.
    """
    if group not in _names:
        name = f"{group.group_name}/{_store_id(rendezvous_store())}"
        _names[group] = f"{name}/{_namesakes[name]}"
        _namesakes[name] += 1
    return _names[group]


def _store_id(store: dist.Store) -> str:
    """A random id, which the first rank that asks leaves in the store: another store may have the same address."""
    if store not in _store_ids:
        _store_ids[store] = store.compare_set("moe_ep/store", "", secrets.token_hex(8)).decode()
    return _store_ids[store]


def set_text(store: dist.Store, key: str, text: str) -> None:
    """Leaves a text of any size: its first part under the key, behind how many more there are, and those before it."""
    first, *others = [text[start : start + PART_CHARACTERS] for start in range(0, len(text), PART_CHARACTERS)] or [""]
    for number, part in enumerate(others):
        store.set(f"{key}/{number}", part)
    store.set(key, f"{len(others)} {first}")


def get_text(store: dist.Store, key: str) -> str:
    """A text that `set_text` left, and waits for it."""
    count, _, first = store.get(key).partition(b" ")
    return first.decode() + "".join(store.get(f"{key}/{number}").decode() for number in range(int(count)))


def delete_text(store: dist.Store, key: str, num_characters: int) -> None:
    """Removes a text of so many characters."""
    for number in range((num_characters - 1) // PART_CHARACTERS):
        store.delete_key(f"{key}/{number}")
    store.delete_key(key)


def call_in_thread(name: str, call: Callable[[], T]) -> Future[T]:
    """Calls it in a thread of its own, since the call may hang: then it is abandoned, also when Python ends."""
    future: Future[T] = Future()

    def run(future: Future[T]) -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        finally:
            del future  # its error's traceback has this frame: together they would outlive their last user

    threading.Thread(target=run, args=(future,), name=name, daemon=True).start()
    return future


def ask_store(question: Callable[[dist.Store], T], limit_s: float, gives_up: Callable[[], bool] = lambda: False) -> T:
    """Returns what `question` finds in the store, over a connection of its own: another one may be blocked in a wait.

    Args:
        gives_up: polled; once it is true, the answer is not waited for any more.

    Raises:
        RuntimeError: the store cannot be reached, or does not answer in time.
    """
    store = rendezvous_store()
    # A process that is stopped keeps its connections, and nothing else ends a wait for it.
    until = time.monotonic() + limit_s
    asking = call_in_thread("moe_ep-ask", lambda: question(_connect_until(store, until)))
    while not asking.done() and time.monotonic() < until and not gives_up():
        wait([asking], min(_ASK_POLL_S, limit_s))
    if asking.done():
        return asking.result()
    raise RuntimeError(
        f"it did not answer for {limit_s:g} s: the process that holds it, often rank 0, is dead or stuck"
    )


def end_calls(host: str, port: int) -> None:
    """Ends all calls of this process to the store at an address, which then raise DistError, and later ones too.

    Nothing else ends a call whose server is stopped or out of reach.
    """
    addresses = {str(found[4][0]) for found in socket.getaddrinfo(host, port)}
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile, or not connected
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(number))) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                peer, its_port, *_ = connection.getpeername()
                if its_port == port and str(peer).removeprefix("::ffff:") in addresses:
                    connection.shutdown(socket.SHUT_RDWR)


def listen_to_store(listener: Listener) -> None:
    """Has the thread call the listener, until the listener is gone."""
    _thread.add(listener)


def close_at_exit(what: Closable) -> None:
    """Closes it when Python ends, if it still exists: a thread that is in C++ by then, or one of gloo's that still
    holds a tensor, aborts the process when it needs Python."""
    _open.add(what)


def connect_again(store: dist.Store) -> dist.Store:
    """Another connection to the store."""
    return store.clone()  # type: ignore[attr-defined]


def _connect_until(store: dist.Store, until: float) -> dist.Store:
    """Another connection to a store that may be dead. TCPStore logs stack traces of failed attempts, so a plain socket
    tries first.

    Raises:
        RuntimeError: nothing listens at its address by then.
    """
    inner = store
    while isinstance(inner, dist.PrefixStore):
        inner = inner.underlying_store
    while isinstance(inner, dist.TCPStore):
        try:
            socket.create_connection((inner.host, inner.port), max(until - time.monotonic(), LOOK_S)).close()
            break
        except OSError as error:
            if time.monotonic() > until:
                raise RuntimeError(f"it cannot be reached ({error})") from None
            time.sleep(_ASK_POLL_S)
    return connect_again(store)


_open: WeakSet[Closable] = WeakSet()


@atexit.register
def close_all() -> None:
    for what in list(_open):
        try:
            what.close()
        except Exception:
            logger.exception("%s could not be closed", type(what).__name__)


class _ListeningThread:
    def __init__(self) -> None:
        self._listeners: WeakSet[Listener] = WeakSet()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._default: Callable[[], dist.Store | None] = lambda: None
        self._connection: dist.Store | None = None
        self._connecting: Future[dist.Store | None] | None = None
        close_at_exit(self)

    def add(self, listener: Listener) -> None:
        with self._lock:
            self._listeners.add(listener)
            if self._thread is None:
                self._thread = threading.Thread(target=self._listen, name="moe_ep-listen", daemon=True)
                self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _listen(self) -> None:
        while not self._closed.wait(LOOK_S):
            try:
                self._look()
            except RuntimeError as error:
                # Where the store is gone, so is the job; otherwise the next look connects again.
                logger.debug("the ranks' store cannot be reached: %s", error)
                self._connection = None

    def _look(self) -> None:
        with self._lock:
            listeners = list(self._listeners)
        default = rendezvous_store()
        if self._default() is not default:
            # A weak reference: the store ends with its group, and on one rank others reach it only as long.
            self._connection, self._connecting, self._default = None, None, ref(default)
        if self._connection is None:
            self._connection = self._connect(default)
        if self._connection is not None:
            for listener in listeners:
                listener.listen(self._connection)

    def _connect(self, store: dist.Store) -> dist.Store | None:
        """Another connection to the store; None while it cannot be reached.

        A thread of its own makes it: a connection to a stopped process hangs, and the default store may change
        meanwhile.
        """

        def attempt() -> dist.Store | None:
            try:
                return _connect_until(store, time.monotonic())
            except RuntimeError as error:  # not left in the future, where it would keep the store
                logger.debug("the ranks' store cannot be reached: %s", error)
                return None

        if self._connecting is None:
            self._connecting = call_in_thread("moe_ep-connect", attempt)
        wait([self._connecting], LOOK_S)
        if not self._connecting.done():
            return None
        connecting, self._connecting = self._connecting, None
        return connecting.result()


_thread = _ListeningThread()
