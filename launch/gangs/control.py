"""Requests to a running gang to add or remove a worker: lines of JSON over a loopback socket. The gang says at once
that it has taken a request, and answers when it is done.

The gang's launcher listens, and writes the token that a request needs to a file that only this user can read.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import queue
import secrets
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moe_ep import env
from moe_ep.errors import ConfigError, GangError
from moe_ep.launch.gangs import waiting
from moe_ep.launch.gangs.rank_env import LOOPBACK

# Limits of a request, which is a short line.
_MOST_BYTES, _REQUEST_S = 4096, 5.0
# Limit of the wait for the answer: a worker that joins loads the model first.
ANSWER_S = 600.0
_TAKEN = {"taken": True}


def _token_folder() -> Path:
    return env.CACHE_DIR.get() / "gangs"


def _token_file(port: int) -> Path:
    return _token_folder() / f"{port}.token"


def make_token_folder() -> None:
    """Makes the folder of tokens if it is missing; ConfigError if nothing can be written there."""
    folder = _token_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"the token of an elastic gang cannot be written to {folder} ({error.strerror}); set {env.CACHE_DIR.name} "
            f"to a folder that can be written to"
        ) from error


class Request:
    """One request to the gang, of the kind "join" or "leave"; `answer` ends it."""

    def __init__(self, kind: str, rank: int) -> None:
        self.kind, self.rank = kind, rank
        self._answered = threading.Event()
        self._answer: dict[str, str] = {"error": "the gang ended before it was done"}

    def answer(self, text: str = "", error: str = "") -> None:
        """Sends the result, or why the request failed."""
        self._answer = {"error": error} if error else {"done": text}
        self._answered.set()

    def close(self) -> None:
        """Ends the wait of a request that has no answer: the gang has ended."""
        self._answered.set()

    def wait(self) -> dict[str, str]:
        self._answered.wait(ANSWER_S)
        return self._answer


class ControlServer:
    """Listens for requests at `address`, a free port of loopback; a context manager."""

    def __init__(self) -> None:
        make_token_folder()
        self._listener = socket.create_server((LOOPBACK, 0))
        port = self._listener.getsockname()[1]
        self.address, self._token = f"{LOOPBACK}:{port}", secrets.token_hex(16)
        self._file = _token_file(port)
        self._file.unlink(missing_ok=True)
        with os.fdopen(os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(self._token)
        self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        # Requests without an answer yet, and whether the gang has ended.
        self._open: set[Request] = set()
        self._is_closed, self._lock = False, threading.Lock()
        threading.Thread(target=self._listen, name="moe_ep-control", daemon=True).start()

    def requests(self) -> Iterator[Request]:
        """The requests since the last call."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._requests.get_nowait()

    def __enter__(self) -> ControlServer:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept
        self._listener.close()
        with self._lock:
            self._is_closed = True
            for request in self._open:
                request.close()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):  # it is closed
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError), connection.makefile("rb") as lines:
            connection.settimeout(_REQUEST_S)
            try:
                message = json.loads(lines.readline(_MOST_BYTES))
                if not hmac.compare_digest(str(message["token"]), self._token):
                    raise ValueError("the token is another gang's")
                kind = str(message["kind"])
                if kind not in ("join", "leave"):
                    raise ValueError(f"{kind!r} is neither join nor leave")
                request = Request(kind, int(message.get("rank", -1)))
            except (ValueError, KeyError, TypeError) as error:
                answer = {"error": f"the gang did not take the request: {error}"}
            else:
                self._take(request)
                connection.sendall(f"{json.dumps(_TAKEN)}\n".encode())
                answer = request.wait()
                with self._lock:
                    self._open.discard(request)
            connection.sendall(f"{json.dumps(answer)}\n".encode())

    def _take(self, request: Request) -> None:
        with self._lock:
            if self._is_closed:
                request.close()
            self._open.add(request)
        self._requests.put(request)


def ask(address: str, token: str | None, kind: str, rank: int = -1) -> str:
    """Sends a request to the gang at an address, and returns its answer when it is done.

    Args:
        token: None reads the file on the gang's machine.

    Raises:
        ConfigError: no gang listens there, or there is no token for it.
        GangError: the gang refuses or fails.
    """
    host, _, port = address.rpartition(":")
    file = _token_file(int(port))
    if token is None:
        try:
            token = file.read_text()
        except OSError:
            raise ConfigError(f"--address is {address} and {file} has no token for it; give --token") from None
    no_gang = f"--address is {address}, where no gang answers"
    try:
        with (
            socket.create_connection((host.strip("[]"), int(port)), timeout=_REQUEST_S) as connection,
            connection.makefile("rb") as lines,
        ):
            connection.sendall(f"{json.dumps({'token': token, 'kind': kind, 'rank': rank})}\n".encode())
            answer = _object_of(lines.readline(_MOST_BYTES))
            if answer is None or not answer.keys() & {"error", *_TAKEN}:
                raise ConfigError(f"{no_gang} (something else listens there); see its line `control:`")
            if answer == _TAKEN:
                connection.settimeout(ANSWER_S + _REQUEST_S)
                with waiting.said(f"the gang at {address} to do it, for at most {ANSWER_S:g} s"):
                    answer = _object_of(lines.readline(_MOST_BYTES))
    except OSError as error:
        raise ConfigError(f"{no_gang} ({error}); see its line `control:`") from None
    if answer is None:
        raise GangError(f"the gang at {address} ended before it was done")
    if answer.get("error"):
        raise GangError(str(answer["error"]))
    return str(answer.get("done", ""))


def _object_of(line: bytes) -> dict[str, Any] | None:
    """The object of a line of JSON; None for anything else, such as the end of the stream."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
