"""The Ray cluster under a gang: joining one, or starting one on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import moe_ep
from moe_ep import env
from moe_ep.errors import GangError
from moe_ep.launch.gangs import interrupts
from moe_ep.launch.gangs.gang import check_room, num_cpus
from moe_ep.launch.gangs.processes import children, end_trees, has_ended, named, start_guard
from moe_ep.launch.gangs.rank_env import LOOPBACK

# A worker of a running cluster gets these of the driver's variables; workers of a private one inherit them all.
_PASSED_ON = ("MOE_EP_", "NCCL_", "NVSHMEM_", "GLOO_", "TORCH_", "TRITON_", "CUDA_MODULE_LOADING")
# After ctrl-C: Ray looks for a cluster where no signal is heard.
_JOIN_LIMIT_S = 5.0
# How long a server may take to answer.
_ANSWER_LIMIT_S = 20.0
# What a client of gRPC says first, and the kind of frame that its server answers with (RFC 9113, 3.4 and 6.5).
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_SETTINGS = 4
# Without one of these a cluster of one machine is none.
_SERVERS = ("gcs_server", "raylet")


def connect(address: str | None, num_workers: int, device: str = "auto") -> PrivateCluster | None:
    """Joins the cluster at `address`, the one this process belongs to, or else starts a private one on loopback.

    Returns:
        The private one, which is the caller's to end.

    Raises:
        GangError: nothing answers at the address.
        NoRoomError: a private cluster could not hold as many workers.
        ImportError: Ray is not installed.
    """
    address = joined_address(address)
    try:
        import ray
    except ImportError as error:
        raise ImportError(
            "--launcher ray needs Ray, which is not installed; run: pip install 'ray[default]'"
        ) from error
    if ray.is_initialized():
        return None
    talks = env.LOG_LEVEL.get() in ("DEBUG", "INFO")
    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": talks}
    # Ray would print its own account of a dead worker on stdout; the gang's error says it.
    ray._private.worker._worker_logs_enabled = talks
    if address:
        address = _found(address)
        _check_listening(address)
        try:
            with _own_sigterm_handler(), interrupts.ending_within(_JOIN_LIMIT_S):
                ray.init(address=address, **quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise GangError(f"no Ray cluster answers at {address}: {first_line(error)}{_token()}") from None
        return None
    check_room(num_workers, "cuda" if device == "cuda" else "cpu")
    return PrivateCluster(max(num_cpus(), num_workers), quiet)


def joined_address(address: str | None) -> str | None:
    """The cluster to join: at the address that is given, or else in RAY_ADDRESS. None for local, which is Ray's word
    for a cluster of one's own, and where neither is set."""
    address = address or os.environ.get("RAY_ADDRESS")
    return None if address in (None, "", "local") else address


def _token() -> str:
    """What may be amiss where a cluster wants a token and this process sends none."""
    if os.environ.get("RAY_AUTH_MODE") == "token":
        return ""
    return "; if it wants a token, as clusters of newer Ray do, set RAY_AUTH_MODE=token"


def first_line(error: Exception) -> str:
    """What an error of Ray says, without the pages that may follow and the full stop."""
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(". ")


def _newest_logs() -> Path:
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    return Path(folder, "ray", "session_latest", "logs")


def _way_out(error: Exception) -> str:
    if "AF_UNIX path" in str(error):
        return "set TMPDIR to a folder with a short path"
    return "set HOME and TMPDIR to folders that can be written to" if isinstance(error, OSError) else "try again"


class PrivateCluster:
    """A cluster on loopback that lives until `end`.

    Where Ray is interrupted while it starts, it kills the raylet and leaves the agents that belong to it behind, and
    where this process is killed they stay for a minute; so the processes that it starts are looked after here.

    Args:
        options: more of `ray.init`'s.
    """

    def __init__(self, num_cpus: int, options: dict[str, Any]) -> None:
        import ray

        self._guard: subprocess.Popen[bytes] | None = None
        before = children(os.getpid())
        try:
            with _loopback_cluster(), _environment(worker_variables()), _own_sigterm_handler():
                ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, **options)
        except BaseException as error:
            self._processes = children(os.getpid()) - before
            self.end()
            if isinstance(error, Exception):
                # Of no class of its own where a server of the cluster was not up in Ray's time, as on a busy machine.
                raise GangError(
                    f"Ray did not start here: {first_line(error)}; its logs are in {_newest_logs()}; "
                    f"{_way_out(error)}, or take --launcher local, which needs no Ray"
                ) from error
            raise
        self._processes = children(os.getpid()) - before
        self._servers = named(self._processes, *_SERVERS)
        self._guard = start_guard(self._processes)

    def check(self) -> None:
        """Ends the cluster and raises GangError if a server of it has ended: Ray tells of a raylet after 15 s, and of a
        GCS never, but ends this process after a minute of vain calls."""
        for process, name in self._servers.items():
            if has_ended(process):
                with end_trees(self._processes, limit_s=0.0):
                    pass  # and not the cluster's own way, in which it would be waited for
                self.end()
                raise GangError(
                    f"Ray is gone: its {name} on this machine (pid {process[0]}) ended while the gang was at work, "
                    f"killed or crashed (if nobody killed it, see dmesg and {_newest_logs()})"
                )

    def end(self) -> None:
        """Ends the cluster; nothing of it is left. A second time does no harm."""
        import ray

        with end_trees(self._processes):
            ray.shutdown()
        if self._guard is not None:
            self._guard.kill()
            self._guard.wait()
            self._guard = None


@contextlib.contextmanager
def _own_sigterm_handler() -> Iterator[None]:
    """Keeps the handler that the program has for SIGTERM, if it has one, while Ray puts its own in its place; what came
    meanwhile is handled by ours too."""
    before = signal.getsignal(signal.SIGTERM)
    is_terminated = False
    try:
        yield
    except SystemExit:  # what Ray's handler raises
        is_terminated = True
        raise
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
            if is_terminated:
                signal.raise_signal(signal.SIGTERM)


@contextlib.contextmanager
def _loopback_cluster() -> Iterator[None]:
    """Has every server of a cluster that is started meanwhile listen on loopback alone.

    Ray does so by itself on systems where it runs on one machine only; this is the switch for that, as its processes
    read it and as this one has read it.
    """
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        with _environment({ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}):
            yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def worker_variables() -> dict[str, str]:
    """What workers need in their environment that a cluster does not give them."""
    variables = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
    variables["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
    root = Path(moe_ep.__path__[0]).resolve().parent
    if str(root) != sysconfig.get_paths()["purelib"] and "RAY_JOB_CONFIG_JSON_ENV_VAR" not in os.environ:
        # A checkout: workers import it from where it lies. In a Ray job the working directory travels by itself.
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    return variables


def _found(address: str) -> str:
    """The address itself, or what auto stands for: RAY_ADDRESS, else the cluster that `ray start` started here last, or
    else the one that runs here. Private ones, which listen on loopback and which `ray start` knows nothing of, are
    somebody else's."""
    from ray._private.services import find_bootstrap_address, find_gcs_addresses

    if "://" in address:  # in RAY_ADDRESS, from where `ray job submit` and Ray's client take it
        others = "Ray's client connects" if address.startswith("ray:") else "jobs are submitted"
        raise GangError(
            f"RAY_ADDRESS is {address!r}, where {others}; submit a job by ray job submit, unset RAY_ADDRESS, or give "
            f"the HOST:PORT that ray start printed"
        )
    if address != "auto":
        return address
    if (given := joined_address(None)) not in (None, "auto"):
        return _found(given)
    started = find_bootstrap_address(None)
    if started and not _why_silent(started):
        return started
    running = sorted(find_gcs_addresses())
    found = [address for address in running if not address.startswith(LOOPBACK)]
    if len(found) == 1:
        return found[0]
    several = f"several Ray clusters run on this machine ({', '.join(found)})"
    none = "no Ray cluster runs on this machine" + (" but other commands' private ones" if running else "")
    raise GangError(
        f"{several if found else none}, and the address is auto; give the HOST:PORT of one, start one by ray start "
        f"--head, or leave the address out"
    )


def _check_listening(address: str) -> None:
    """Says at once that nothing listens there, which Ray finds out in a minute, or never where a cluster is gone; or
    that something else does, which Ray asks again and again, for minutes."""
    if reason := _why_silent(address) or _why_no_cluster(address):
        raise GangError(
            f"no Ray cluster answers at {address} ({reason}); give the address that ray start printed, or leave it out "
            f"to start a cluster on this machine"
        )


def _why_silent(address: str) -> str:
    """Why nobody can be reached there; empty where somebody listens, or where it is no HOST:PORT."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return ""
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, OverflowError) as error:
        return str(error)
    return ""


def _why_no_cluster(address: str) -> str:
    """What listens there, if it is no server of gRPC, as a cluster's is; empty where it is one, or cannot be asked."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return ""
    try:
        with socket.create_connection((host, int(port)), timeout=_ANSWER_LIMIT_S) as connection:
            connection.sendall(_HTTP2_PREFACE)
            answer = connection.recv(16)
    except TimeoutError:
        return f"what listens there said nothing within {_ANSWER_LIMIT_S:g} s"
    except OSError as error:
        return str(error)
    if answer[3:4] == bytes([_SETTINGS]):
        return ""
    return "something else listens there, such as Ray's dashboard, to which ray job submit sends jobs"


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Sets variables that processes started meanwhile inherit."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
