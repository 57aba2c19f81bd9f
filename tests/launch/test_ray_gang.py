"""Ray for real: a local cluster, gangs on it, a killed actor, a placement group around the caller, too little room."""

from __future__ import annotations

import contextlib
import errno
import http.server
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_ep.errors import GangError
from moe_ep.launch.gangs import interrupts, ray_gang
from moe_ep.launch.gangs.processes import children
from moe_ep.launch.gangs.ray_gang import RayGang
from moe_ep.observability import metrics
from tests.launch import jobs
from tests.observability.test_metrics import scrape

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster() -> Iterator[ray_gang.PrivateCluster]:
    """A private cluster of 3 CPUs, started the way a gang starts its own, and kept for all tests of the module."""
    started = ray_gang.connect("local", 3)
    assert started is not None
    yield started
    ray.shutdown()


def free_cpus(expected: float) -> bool:
    """Whether that many CPUs are free, now or soon."""
    return jobs.wait_until(lambda: ray.available_resources().get("CPU", 0) == expected)


def no_group_is_left() -> bool:
    return all(group["state"] == "REMOVED" for group in ray.util.placement_group_table().values())


def test_every_rank_answers_and_everything_is_given_back(cluster: object, capsys: pytest.CaptureFixture[str]) -> None:
    total = ray.cluster_resources()["CPU"]
    items: list[dict[str, int]] = []
    results = RayGang(2, "cpu").run(jobs.describe_aloud, 10, on_item=items.append)
    assert capsys.readouterr().err.count("rank 0 speaks") == 1
    assert items == [{"rank": 0, "sum": 21}]
    assert [(r["rank"], r["world_size"], r["local_rank"], r["sum"], r["source"]) for r in results] == [
        (0, 2, 0, 21, "ray"),
        (1, 2, 1, 21, "ray"),
    ]
    assert all(result["resolved"] is True for result in results)
    assert jobs.all_end([result["pid"] for result in results])
    assert no_group_is_left()
    assert free_cpus(total)


def test_a_cluster_is_known_by_its_first_words(cluster: object) -> None:
    assert not ray_gang.why_no_cluster(ray.get_runtime_context().gcs_address)


def test_nothing_of_a_private_cluster_listens_beyond_loopback(cluster: object) -> None:
    node = ray.nodes()[0]
    assert node["NodeManagerAddress"] == "127.0.0.1"
    addresses = {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    for address in addresses - {"127.0.0.1", "127.0.1.1"}:
        for port in (node["NodeManagerPort"], int(ray.get_runtime_context().gcs_address.rpartition(":")[2])):
            with pytest.raises(OSError):
                socket.create_connection((address, port), timeout=2)


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("raise", "ValueError: the tensor has a hole"),
        ("SIGKILL", "the process (pid "),
        pytest.param("SIGTERM", "the process (pid ", marks=pytest.mark.thorough),
    ],
)
def test_the_first_failure_is_named_and_ends_the_gang(cluster: object, how: str, cause: str, tmp_path: Path) -> None:
    total = ray.cluster_resources()["CPU"]
    with pytest.raises(GangError) as caught:
        RayGang(2, "cpu").run(jobs.fail, 1, how, str(tmp_path))
    message = str(caught.value)
    assert message.startswith(f"rank 1 on node 127.0.0.1 failed: {cause}")
    assert ("in fail" in message) == (how == "raise")
    assert ("died: killed by a signal" in message) == (how != "raise")
    assert jobs.all_end(jobs.pids_in(tmp_path, 2))
    assert no_group_is_left()
    assert free_cpus(total)


def test_inside_a_placement_group_it_uses_that_one(cluster: object) -> None:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = ray.util.placement_group([{"CPU": 1}, {"CPU": 2}])
    ray.get(group.ready(), timeout=jobs.LIMIT_S)
    strategy = PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True)
    kind: Any = ray.remote
    caller = kind(num_cpus=0, scheduling_strategy=strategy)(run_inside)
    try:
        sums, groups, refusal = ray.get(caller.remote(), timeout=jobs.LIMIT_S)
    finally:
        ray.util.remove_placement_group(group)
    assert sums == [1, 1]
    assert groups == 1
    assert "asks for 4 CPUs (one a worker) and there are 3 in the placement group this process runs in" in refusal


def run_inside() -> tuple[list[int], int, str]:
    """In a task of the placement group: a gang that fits, the groups there are while it is done, and one too large."""
    results = RayGang(2, "cpu").run(jobs.describe, 0)
    groups = [group for group in ray.util.placement_group_table().values() if group["state"] == "CREATED"]
    with pytest.raises(GangError) as caught:
        RayGang(4, "cpu").run(jobs.describe, 0)
    return [result["sum"] for result in results], len(groups), str(caught.value)


@pytest.mark.parametrize(("world_size", "device", "asked"), [(99, "cpu", "99 CPUs"), (1, "cuda", "1 GPUs")])
def test_too_little_room_is_said_at_once(
    cluster: object, world_size: int, device: str, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cuda" and ray.cluster_resources().get("GPU", 0):
        pytest.skip("this machine has GPUs")
    monkeypatch.setattr(ray_gang, "FREE_LIMIT_S", 600.0)  # of what others may give back
    started = time.monotonic()
    with pytest.raises(GangError) as caught:
        RayGang(world_size, device)
    assert time.monotonic() - started < jobs.SOON_S
    assert f"the gang asks for {asked} (one a worker) and there are" in str(caught.value)
    assert "free of" in str(caught.value)
    assert no_group_is_left()


def test_metrics_of_a_worker_come_from_its_node(cluster: object) -> None:
    class Teller:
        def tell(self) -> None:
            sink = metrics.RaySink()
            for metric in metrics.ALL:
                sink.put(metric, 2.0, **dict.fromkeys(metric.labels, "0"))

    teller = ray.remote(num_cpus=0)(Teller).remote()
    ray.get(teller.tell.remote())
    port = ray.nodes()[0]["MetricsExportPort"]
    wanted = {f"ray_{m.name}" + ("_count" if m.kind == "histogram" else "") for m in metrics.ALL}

    def are_seen() -> bool:
        with contextlib.suppress(OSError):  # nobody listens before the node's agent is up
            return wanted <= {name.split("{")[0] for name in scrape(port)}
        return False

    assert jobs.wait_until(are_seen)
    ray.kill(teller)


def test_a_server_of_the_cluster_that_is_killed_ends_the_gang(cluster: ray_gang.PrivateCluster, tmp_path: Path) -> None:
    """The last test of this cluster."""
    servers = {name: pid for (pid, _), name in cluster.servers.items()}
    assert set(servers) == {"gcs_server", "raylet"}
    gang, pids = RayGang(2, "cpu"), []
    gang.cluster = cluster  # as of a gang that started it

    def kill() -> None:
        pids.extend(jobs.pids_in(tmp_path, 2))
        os.kill(servers["gcs_server"], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(GangError, match=rf"^Ray is gone: its gcs_server on this machine \(pid {servers['gcs_server']}"):
        gang.run(jobs.hang, str(tmp_path))
    killer.join()
    assert jobs.all_end([*pids, *(pid for pid, _ in cluster.processes)])
    assert not ray.is_initialized()


@pytest.mark.thorough  # test_run.py ends the same by a SIGTERM
def test_ctrl_c_ends_workers_and_cluster(tmp_path: Path) -> None:
    code = "import sys; from moe_ep.launch.gangs.ray_gang import RayGang; from tests.launch import jobs\n"
    driver = jobs.start_python(code + "RayGang(1, 'cpu').run(jobs.hang, sys.argv[1])", str(tmp_path))
    pids = jobs.pids_in(tmp_path, 1)
    session = jobs.session_pids(driver.pid)
    assert len(session) > 3
    os.killpg(driver.pid, signal.SIGINT)
    _, errors = driver.communicate(timeout=jobs.LIMIT_S)
    assert "KeyboardInterrupt" in errors
    assert jobs.all_end(pids)
    assert jobs.all_end(session)


def test_no_file_is_left_of_a_private_cluster() -> None:
    # Ray's sockets lie below it, and their paths must be short.
    folder = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    code = "from moe_ep.launch.gangs.ray_gang import RayGang; from tests.launch import jobs\n"
    driver = jobs.start_python(code + "print(RayGang(1, 'cpu').run(jobs.describe, 10))", TMPDIR=str(folder))
    output, errors = driver.communicate(timeout=jobs.LIMIT_S)
    left = [path for path in folder.rglob("*") if not path.is_dir()]
    shutil.rmtree(folder)
    assert "'sum': 10" in output, errors
    assert left == []


def test_nothing_is_left_of_a_driver_that_was_killed(tmp_path: Path) -> None:
    code = "import sys; from moe_ep.launch.gangs.ray_gang import RayGang; from tests.launch import jobs\n"
    driver = jobs.start_python(code + "RayGang(1, 'cpu').run(jobs.hang, sys.argv[1])", str(tmp_path))
    pids = jobs.pids_in(tmp_path, 1)
    started = {*pids, *jobs.session_pids(driver.pid), *(pid for pid, _ in children(driver.pid))}
    driver.kill()
    driver.communicate(timeout=jobs.LIMIT_S)
    assert jobs.all_end([*started])


@pytest.mark.parametrize(
    ("error", "sentences"),
    [
        (
            Exception("The current node timed out during startup.\nPages follow."),
            "The current node timed out during startup; its logs are in /scratch/ray/session_latest/logs; try again",
        ),
        (
            OSError(errno.EROFS, "Read-only file system", "/home/.ray"),
            "[Errno 30] Read-only file system: '/home/.ray'; its logs are in /scratch/ray/session_latest/logs; set "
            "HOME and TMPDIR to folders that can be written to",
        ),
    ],
)
def test_a_cluster_that_does_not_start_is_one_sentence(
    error: Exception, sentences: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**options: object) -> None:
        raise error

    ray.shutdown()  # a gang would join the cluster of the tests before
    monkeypatch.setattr("ray.init", init)
    monkeypatch.setenv("RAY_TMPDIR", "/scratch")
    with pytest.raises(GangError) as caught:
        RayGang(2, "cpu")
    assert str(caught.value) == f"Ray did not start here: {sentences}, or take --launcher local, which needs no Ray"


def test_sigterm_while_a_cluster_starts_is_an_interrupt_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: object) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))  # as Ray does
        signal.raise_signal(signal.SIGTERM)

    ray.shutdown()
    monkeypatch.setattr("ray.init", init)
    with interrupts.raised_as_interrupt():
        with pytest.raises(KeyboardInterrupt):
            RayGang(2, "cpu")
        assert interrupts.received() == signal.SIGTERM


def test_a_node_that_ray_gave_up_is_not_taken_for_a_killed_process() -> None:
    from ray.core.generated.common_pb2 import ActorDiedErrorContext

    said = "SYSTEM_ERROR Worker exit detail: Owner's node has crashed."
    error = ray.exceptions.ActorDiedError(ActorDiedErrorContext(error_message=said, actor_id=bytes(16), pid=7))
    failure = ray_gang.actor_failure(error, 1, "10.0.0.1")
    assert failure.cause.startswith("Ray gave up its node or the driver's: ") and not failure.traceback


def test_nothing_answers_at_the_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ray.shutdown()
    with pytest.raises(GangError, match="no Ray cluster answers at 127.0.0.1:9"):
        RayGang(1, "cpu", address="127.0.0.1:9")
    # What a cluster that is gone leaves behind.
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:9")
    running: set[str] = set()
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", lambda: running)
    with pytest.raises(GangError, match="no Ray cluster runs on this machine, and the address is auto"):
        RayGang(1, "cpu", address="auto")
    running.add("127.0.0.1:8")  # another command's
    with pytest.raises(GangError, match="but other commands' private ones, and the address is auto"):
        RayGang(1, "cpu", address="auto")


def test_something_else_listens_at_the_address() -> None:
    ray.shutdown()
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        server.timeout = 20
        web = threading.Thread(target=lambda: [server.handle_request() for _ in range(2)])
        web.start()
        address = f"127.0.0.1:{server.server_port}"
        with pytest.raises(GangError, match=f"no Ray cluster answers at {address} .something else listens there, such"):
            RayGang(1, "cpu", address=address)
        web.join()


def test_what_auto_stands_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    running = {"127.0.0.1:8", "10.0.0.1:6379"}
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", lambda: running)
    assert ray_gang.resolve_address("auto") == "10.0.0.1:6379"
    running.add("10.0.0.2:6379")
    with pytest.raises(GangError, match=r"several Ray clusters run on this machine \(10.0.0.1:6379, 10.0.0.2:6379\)"):
        ray_gang.resolve_address("auto")
    with socket.create_server(("127.0.0.1", 0)) as started:
        address = f"127.0.0.1:{started.getsockname()[1]}"
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        for unset in ("", "auto", "local"):
            monkeypatch.setenv("RAY_ADDRESS", unset)
            assert ray_gang.resolve_address("auto") == address
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.3:6379")
    assert (
        ray_gang.resolve_address("auto") == "10.0.0.3:6379" and ray_gang.resolve_address("10.0.0.4:1") == "10.0.0.4:1"
    )
    others = {"http://127.0.0.1:8265": "jobs are submitted", "ray://10.0.0.5:10001": "Ray's client connects"}
    for url, what in others.items():
        monkeypatch.setenv("RAY_ADDRESS", url)
        with pytest.raises(GangError, match=f"RAY_ADDRESS is '{url}', where {what}; submit a job by ray job submit"):
            ray_gang.resolve_address("auto")
