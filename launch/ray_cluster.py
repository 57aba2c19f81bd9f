"""The Ray cluster under a gang: joining or starting one, what room it has, and placement groups for the workers."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sysconfig
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import moe_ep
from moe_ep import env
from moe_ep.errors import GangError
from moe_ep.launch.gang import check_room, not_enough, num_cpus
from moe_ep.launch.processes import children, end_trees

# A worker of a running cluster gets these of the driver's variables; workers of a private one inherit them all.
_PASSED_ON = ("MOE_EP_", "NCCL_", "NVSHMEM_", "GLOO_", "TORCH_", "TRITON_", "CUDA_MODULE_LOADING")
# Ray frees what a gang before held a moment after its workers have ended.
_FREE_LIMIT_S = 5.0
_PLACE_LIMIT_S = 60.0


@dataclass(frozen=True)
class Slot:
    """Room for one worker: a bundle of a placement group, and the node it lies on."""

    node_ip: str
    placement_group: Any
    bundle: int


@dataclass(frozen=True)
class Room:
    """Free GPUs or CPUs of one node."""

    node_ip: str
    node_id: str
    count: int


def connect(address: str | None, num_workers: int, device: str = "auto") -> PrivateCluster | None:
    """Joins the cluster at `address`, the one this process belongs to, or else starts a private one on loopback.

    Returns:
        The private one, which is the caller's to end.

    Raises:
        GangError: nothing answers at the address.
        NoRoomError: a private cluster could not hold as many workers.
        ImportError: Ray is not installed.
    """
    address = address or os.environ.get("RAY_ADDRESS")
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
        _check_listening(address)
        try:
            with _own_sigterm_handler():
                ray.init(address=address, **quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise GangError(f"no Ray cluster answers at {address}: {first_line(error)}{_token()}") from None
        return None
    check_room(num_workers, "cuda" if device == "cuda" else "cpu")
    return PrivateCluster(max(num_cpus(), num_workers), quiet)


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


class PrivateCluster:
    """A cluster on loopback that lives until `end`.

    Where Ray is interrupted while it starts, it kills the raylet and leaves the agents that belong to it behind; so
    the processes that it starts are looked after here.

    Args:
        options: more of `ray.init`'s.
    """

    def __init__(self, num_cpus: int, options: dict[str, Any]) -> None:
        import ray

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
                    f"Ray did not start here: {first_line(error)}; its logs are in {_newest_logs()}; try again, or "
                    f"take --launcher local, which needs no Ray"
                ) from error
            raise
        self._processes = children(os.getpid()) - before

    def end(self) -> None:
        """Ends the cluster; nothing of it is left."""
        import ray

        with end_trees(self._processes):
            ray.shutdown()


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


def total_of(resource: str) -> int:
    """GPUs or CPUs of the cluster, free or not."""
    import ray

    return int(ray.cluster_resources().get(resource, 0))


def plan(resource: str, world_size: int) -> list[Room]:
    """How many workers go to which node, nodes in the order of their IPs.

    Raises:
        GangError: there is not enough room; says what is asked and what is there.
    """
    total = total_of(resource)
    deadline = time.monotonic() + (_FREE_LIMIT_S if total >= world_size else 0)
    while True:
        nodes = _room(resource)
        num_free = sum(node.count for node in nodes)
        if num_free >= world_size:
            break
        if time.monotonic() > deadline:
            where = ", ".join(f"{node.node_ip}: {node.count}" for node in nodes)
            raise not_enough(f"{resource}s", world_size, f"{num_free} free of {total} in the Ray cluster ({where})")
        time.sleep(0.1)
    chosen, left = [], world_size
    for node in nodes:
        if take := min(node.count, left):
            chosen.append(Room(node.node_ip, node.node_id, take))
            left -= take
    return chosen


def _room(resource: str) -> list[Room]:
    import ray
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    nodes = [
        Room(node["NodeManagerAddress"], node["NodeID"], int(free.get(node["NodeID"], {}).get(resource, 0)))
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(nodes, key=lambda node: (ip_key(node.node_ip), node.node_id))


@contextlib.contextmanager
def slots(resource: str, world_size: int) -> Iterator[list[Slot]]:
    """Room for every worker: in the placement group this process runs in, else in one made for each node.

    Groups made here are removed at the end of the block.
    """
    import ray
    from ray.util import get_current_placement_group
    from ray.util.placement_group import placement_group, remove_placement_group

    inside = get_current_placement_group()
    if inside is not None:
        yield _slots_inside(inside, resource, world_size)
        return
    groups: list[Any] = []
    try:
        made = []
        for node in plan(resource, world_size):
            bundle = {resource: 1, f"node:{node.node_ip}": 0.001}
            groups.append(placement_group([bundle] * node.count, strategy="STRICT_PACK"))
            made += [Slot(node.node_ip, groups[-1], index) for index in range(node.count)]
        _, waiting = ray.wait([group.ready() for group in groups], num_returns=len(groups), timeout=_PLACE_LIMIT_S)
        if waiting:
            raise GangError(
                f"Ray did not place {len(waiting)} of {len(groups)} placement group(s) within {_PLACE_LIMIT_S:g} s; "
                f"somebody else took the room: try again or lower --ep-size"
            )
        yield made
    finally:
        for group in groups:
            remove_placement_group(group)


def _slots_inside(group: Any, resource: str, world_size: int) -> list[Slot]:
    import ray
    from ray.util import placement_group_table

    table = placement_group_table(group)
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    found = [
        Slot(addresses[table["bundles_to_node_id"][index]], group, index)
        for index, bundle in table["bundles"].items()
        for _ in range(int(bundle.get(resource, 0)))
    ]
    if len(found) < world_size:
        raise not_enough(f"{resource}s", world_size, f"{len(found)} in the placement group this process runs in")
    return sorted(found, key=lambda slot: (ip_key(slot.node_ip), slot.bundle))[:world_size]


def ip_key(ip: str) -> tuple[int, tuple[int, ...], str]:
    """Sorts IPv4 addresses by their numbers, and anything else after them by its letters."""
    parts = ip.split(".")
    numeric = all(part.isdecimal() for part in parts)
    return (0, tuple(map(int, parts)), ip) if numeric else (1, (), ip)


def _check_listening(address: str) -> None:
    """Says at once that nothing listens there, which Ray takes a minute to find out."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, OverflowError) as error:
        raise GangError(
            f"no Ray cluster answers at {address} ({error}); give the address that ray start printed, or leave it out "
            f"to start a cluster on this machine"
        ) from None


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
