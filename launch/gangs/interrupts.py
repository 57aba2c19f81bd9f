"""Ends commands early, on a signal or at a time limit.

Ctrl-C, a job manager's SIGTERM and the SIGHUP of a closed terminal unwind alike, so that gangs and placement groups are
taken down. Work that hangs in a library is ended with its process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from types import FrameType

from moe_ep.launch.gangs.processes import children

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Number of innermost calls that are shown of a process that hangs.
_SHOWN_CALLS = 10
# A signal that came during an import is sent again after this.
_IMPORT_POLL_S = 0.02
# A process without children has nothing to take down, and need not finish longer imports.
_IMPORT_LIMIT_S = 1.5

_received: int | None = None
_received_at = 0.0
_raised = False
_hearing: FrameType | None = None


@contextlib.contextmanager
def raised_as_interrupt() -> Iterator[None]:
    """Has each of the signals raise KeyboardInterrupt inside the block; `received` returns which it was.

    A signal during an import is raised after it; where that takes long and no child process needs to be taken down, the
    process ends at once. Under nohup, SIGHUP is ignored.
    """
    global _received, _raised, _hearing
    is_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    heard = [number for number in _ENDING if not (is_nohup and number == signal.SIGHUP)]
    _hearing = sys._getframe(2)  # past this generator and what makes a context of it
    before = {number: signal.signal(number, _note) for number in heard}
    try:
        yield
    finally:
        _received = _hearing = None
        _raised = False
        for number, handler in before.items():
            signal.signal(number, handler)


def received() -> int | None:
    """The signal that was received, or None."""
    return _received


def check() -> None:
    """Raises KeyboardInterrupt if a signal was received. Python drops exceptions that are raised in callbacks, such as
    around a fork.

    To be called in loops that wait for workers, but not while cleaning up after them.
    """
    global _raised
    if _received is not None:
        _raised = True
        raise KeyboardInterrupt


@contextlib.contextmanager
def ending_within(seconds: float) -> Iterator[None]:
    """Ends the process if a signal arrives inside the block and the block is not left within this time.

    Python raises nothing while its main thread is inside a library, for example one that waits for a GPU, or for a peer
    that the same signal has already ended. The current line is written to stderr.
    """
    if threading.current_thread() is not threading.main_thread():  # signals do not reach other threads
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def watch() -> None:
        number = -1
        while number not in (0, *_ENDING):
            number = int.from_bytes(os.read(reader, 1))  # 0 at the end of the pipe: the block was left
        until = time.monotonic() + seconds
        is_inside = number > 0
        while is_inside:
            if not wait([reader], max(until - time.monotonic(), 0.0)):
                where = _stack_of(threading.main_thread().ident)[-1]
                _end(f"ended by {signal.Signals(number).name} while it was in\n{where}", 128 + number)
            is_inside = bool(os.read(reader, 1))
        os.close(reader)

    threading.Thread(target=watch, daemon=True, name="moe_ep-ending-within").start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)


def call_on_signal(number: int, callback: Callable[[], None]) -> None:
    """Calls a function in a thread whenever a signal arrives; to be called once, in the main thread.

    For processes whose main thread stays inside a library and runs no Python handlers, such as Ray's actors.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(number, lambda number, frame: None)  # the default ends the process

    def listen() -> None:
        while True:
            if number in os.read(reader, 64):
                callback()

    threading.Thread(target=listen, daemon=True, name="moe_ep-signal").start()


@contextlib.contextmanager
def ending_after(seconds: float, doing: str, way_out: str | None = None) -> Iterator[None]:
    """Ends the process if the block is not left within this time, with a message on stderr.

    For waits that no exception ends, such as a library's wait for a GPU or for a peer.

    Args:
        doing: what the block does; the message begins with it.
        way_out: what a user can do then; None to say where the block was instead.
    """

    def end(thread: int) -> None:
        where = way_out or f"it was here:\n{''.join(_stack_of(thread)[-_SHOWN_CALLS:])}".rstrip()
        _end(f"{doing} has not ended within {seconds:.3g} s, and the process ends; {where}\n", 1)

    with calling_after(seconds, end, threading.get_ident()):
        yield


@contextlib.contextmanager
def calling_after(seconds: float, function: Callable[..., None], *args: object) -> Iterator[None]:
    """Calls a function, in a thread, if the block is not left within this time."""
    timer = threading.Timer(seconds, function, args)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def unheard_by_children() -> Iterator[None]:
    """Has processes that are started inside the block ignore ctrl-C, which reaches the whole foreground group."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stack_of(thread: int | None) -> list[str]:
    """The stack of a thread, innermost call last."""
    frame = sys._current_frames().get(thread or 0)
    return ["nowhere\n"] if frame is None else traceback.format_stack(frame)


def _end(message: str, code: int) -> None:
    """Ends the process at once. Nothing is unwound, because that may hang too."""
    with contextlib.suppress(Exception):
        os.write(sys.stderr.fileno(), f"moe_ep, process {os.getpid()}: {message}".encode())
    os._exit(code)


def _note(number: int, frame: FrameType | None) -> None:
    global _received, _received_at, _raised
    if _received is None:
        _received_at = time.monotonic()
    _received = number
    if _is_importing(frame):
        # An exception while torch or numpy load is dropped, or leaves them half loaded.
        again = threading.Timer(_IMPORT_POLL_S, _send_again, (number,))
        again.daemon = True
        again.start()
    else:
        _raised = True
        raise KeyboardInterrupt


def _send_again(number: int) -> None:
    thread = threading.main_thread().ident
    if time.monotonic() - _received_at > _IMPORT_LIMIT_S and not (_raised or children(os.getpid())):
        _end("interrupted\n" if number == signal.SIGINT else "terminated\n", 128 + number)
    # If `check` has raised it meanwhile, a second one would interrupt the clean-up.
    if _received is not None and not _raised and thread is not None:
        signal.pthread_kill(thread, number)


def _is_importing(frame: FrameType | None) -> bool:
    """Whether the frame is inside an import, within the block that handles signals."""
    while frame is not None and frame is not _hearing:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
