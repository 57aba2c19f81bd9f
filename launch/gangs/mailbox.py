"""Where a process takes items from one of its workers, which it did not start itself and so has no pipe to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from typing import Any


class Mailbox:
    """Calls a function in this process with what `sender_to` sends from another, one item after the other.

    Senders come one after the other, such as the first rank of each attempt. Once the function has raised something,
    nothing is taken any more and senders fail.

    Attributes:
        address: for `sender_to`, on this machine.
        error: what the function has raised, if anything.
    """

    def __init__(self, take: Callable[[Any], None]) -> None:
        self.error: BaseException | None = None
        self._take = take
        # In a folder that only this user can enter.
        self._listener = Listener(family="AF_UNIX")
        self.address = str(self._listener.address)
        self._thread = threading.Thread(target=self._serve, name="moe_ep-mailbox", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Returns when all that was sent is taken; to be called when the senders have ended."""
        with Client(self.address) as last:
            last.send(())
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        is_over = False
        while not is_over:
            with self._listener.accept() as sender:
                is_over = self._take_all(sender)

    def _take_all(self, sender: Connection) -> bool:
        """Takes what one sender has; whether it was `close`, which sends no item."""
        while True:
            try:
                message = sender.recv()
            except (EOFError, OSError):
                return False
            if not message:
                return True
            if self.error is not None:
                return False
            try:
                self._take(message[0])
            except BaseException as error:
                self.error = error


def sender_to(address: str) -> Callable[[Any], None]:
    """What sends items to a mailbox; OSError where it takes none any more."""
    sender = Client(address)
    return lambda item: sender.send((item,))
