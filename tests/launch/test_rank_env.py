"""Who is which rank: every launcher's variables, their contradictions, and the meeting place."""

from __future__ import annotations

import json
import socket
import threading
from dataclasses import asdict, replace
from datetime import timedelta

import pytest
import torch.distributed as dist

from moe_ep.errors import ConfigError, GangError
from moe_ep.launch.gangs.rank_env import RankEnv, first_host, resolve_rank_env
from moe_ep.launch.gangs.rendezvous import (
    addresses_of,
    agree_on_attempt,
    destroy_process_group,
    init_process_group,
    listen_store,
    open_store,
)
from tests.ports import free_ports

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "6",
    "SLURM_NTASKS": "11",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[03-04,9],x1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "2",
}
FROM_TORCHRUN = RankEnv(
    rank=5, world_size=8, local_rank=1, local_world_size=4, node_rank=1,
    master_addr="10.0.0.1", master_port=29500, source="torchrun",
)  # fmt: skip
FROM_SLURM = RankEnv(
    rank=6, world_size=11, local_rank=2, local_world_size=4, node_rank=1,
    master_addr="gpu03", master_port=21579, source="slurm",
)  # fmt: skip
FROM_GANG = RankEnv(
    rank=1, world_size=2, local_rank=1, local_world_size=2, node_rank=0,
    master_addr="127.0.0.1", master_port=4000, source="ray", device="cuda:3",
)  # fmt: skip
GANG = {"MOE_EP_GANG_RANK": json.dumps(asdict(FROM_GANG))}


# What Slurm sets in each kind of process, as Slurm 23 does; a job of two nodes and eight tasks.
JOB = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_JOB_NODELIST": "gpu[03-04]",
    "SLURM_NODELIST": "gpu[03-04]",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "8",
    "SLURM_NPROCS": "8",
    "SLURM_TASKS_PER_NODE": "4(x2)",
}
ONE_TASK = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu03",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
STEP = JOB | {
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
    "SLURMD_NODENAME": "gpu04",
}
RANK_6_OF_8 = replace(FROM_SLURM, world_size=8)


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


SLURM_KINDS = {
    "salloc": (JOB, RankEnv()),
    "salloc without -n": (without(JOB, "SLURM_NTASKS", "SLURM_NPROCS"), RankEnv()),
    "salloc, interactive step": (JOB | ONE_TASK | {"SLURM_STEP_ID": "4294967290"}, RankEnv()),
    "the same without -n": (without(ONE_TASK, "SLURM_STEP_ID"), RankEnv()),
    "the same with the job's number of tasks": (JOB | ONE_TASK | {"SLURM_STEP_ID": "4294967290",
        "SLURM_STEP_NUM_TASKS": "8"}, RankEnv()),
    "sbatch, batch step": (JOB | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}, RankEnv()),
    "sbatch from an interactive step": (JOB | ONE_TASK | {"SLURM_STEP_ID": "4294967291"}, RankEnv()),
    "srun --pty bash": (JOB | ONE_TASK, RankEnv()),
    "srun": (without(STEP, "SLURM_NTASKS", "SLURM_NPROCS"), RANK_6_OF_8),
    "srun -n 8": (STEP, RANK_6_OF_8),
    "srun -n 8 in a larger job": (STEP | {"SLURM_NTASKS": "64", "SLURM_TASKS_PER_NODE": "32(x2)"}, RANK_6_OF_8),
    "srun -n 3 on a part of the nodes": (STEP | {"SLURM_STEP_NODELIST": "gpu04", "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_TASKS_PER_NODE": "3", "SLURM_PROCID": "2", "SLURM_NODEID": "0"},
        replace(FROM_SLURM, rank=2, world_size=3, local_world_size=3, node_rank=0, master_addr="127.0.0.1")),
    "srun in a heterogeneous job": (STEP | {"SLURM_HET_SIZE": "2", "SLURM_NTASKS_HET_GROUP_0": "64"}, RANK_6_OF_8),
    "srun --mpi=pmi2": (STEP | {"PMI_RANK": "6", "PMI_SIZE": "8"}, RANK_6_OF_8),
    "srun --mpi=pmix": (STEP | {"PMIX_RANK": "6", "PMIX_NAMESPACE": "slurm.pmix.1234567.2"}, RANK_6_OF_8),
    "an interactive step with pmi2": (JOB | ONE_TASK | {"PMI_RANK": "0", "PMI_SIZE": "1"}, RankEnv()),
    "torchrun in a step": (JOB | ONE_TASK | TORCHRUN, FROM_TORCHRUN),
    "a gang's worker in a step": (JOB | ONE_TASK | GANG, FROM_GANG),
}  # fmt: skip


@pytest.mark.parametrize("kind", SLURM_KINDS)
def test_slurm(kind: str) -> None:
    variables, expected = SLURM_KINDS[kind]
    assert resolve_rank_env(variables) == expected


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        # Ranks of the second component of a step over two: of one task, of as many, and of more than the first.
        (STEP | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}, "heterogeneous"),
        (STEP | {"SLURM_STEP_NODELIST": "x[1-4]", "SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_TASKS_PER_NODE": "4(x4)",
            "SLURMD_NODENAME": "x1"}, "heterogeneous"),
        (JOB | ONE_TASK | {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_SIZE is 4"),
        (STEP | {"PMI_SIZE": "64"}, "PMI_SIZE is 64"),
        ({"PMI_SIZE": "2"}, "PMI_SIZE is 2"),
        (STEP | {"SLURM_STEP_NUM_TASKS": "many"}, "SLURM_STEP_NUM_TASKS is 'many'"),
    ],
)  # fmt: skip
def test_slurm_variables_that_no_gang_can_be_made_of(variables: dict[str, str], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        resolve_rank_env(variables)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, RankEnv()),
        (TORCHRUN, FROM_TORCHRUN),
        (SLURM, FROM_SLURM),
        (GANG, FROM_GANG),
        (TORCHRUN | SLURM | GANG, FROM_TORCHRUN),
        (SLURM | GANG, FROM_SLURM),
    ],
    ids=["alone", "torchrun", "slurm", "gang", "torchrun-first", "slurm-second"],
)
def test_resolves(variables: dict[str, str], expected: RankEnv) -> None:
    assert resolve_rank_env(variables) == expected


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, "RANK set without WORLD_SIZE, LOCAL_RANK"),
        (TORCHRUN | {"RANK": "8"}, "rank is 8 and world_size is 8 (from torchrun)"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "local_rank is 4 and local_world_size is 4"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "16"}, "local_world_size is 16 and world_size is 8"),
        (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT is 'http'; it must be a whole number"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "master_port is 70000 (from torchrun)"),
        (TORCHRUN | {"MASTER_ADDR": "node1..cluster"}, "master_addr is 'node1..cluster'"),
        (TORCHRUN | {"WORLD_SIZE": "-1"}, "WORLD_SIZE is '-1'; it must be a whole number"),
        ({"SLURM_STEP_NODELIST": "a", "SLURM_NTASKS": "2"}, "SLURM_NTASKS set without SLURM_PROCID, SLURM_LOCALID"),
        (SLURM | {"SLURM_NODEID": "3"}, "SLURM_NODEID is 3"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "four"}, "SLURM_STEP_TASKS_PER_NODE is 'four'"),
        (SLURM | {"SLURM_STEP_NODELIST": "gpu[03"}, "SLURM_STEP_NODELIST is 'gpu[03'"),
        (SLURM | {"SLURM_STEP_NODELIST": "gpu[]"}, "SLURM_STEP_NODELIST is 'gpu[]'"),
    ],
)
def test_refuses_contradictions_in_one_line(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_rank_env(variables)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [("n1", "n1"), ("n1,n2", "n1"), ("gpu[03-05,9],x1", "gpu03"), ("r[1,3]-n[07-08]", "r1-n07"), ("a-b[2]", "a-b2")],
)
def test_first_host_of_a_node_list(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


def test_a_gang_s_variables_survive_the_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (TORCHRUN | SLURM).items():
        monkeypatch.setenv(name, value)
    for name in GANG:
        monkeypatch.setenv(name, "")
    FROM_GANG.export()
    assert resolve_rank_env() == FROM_GANG


def test_the_store_listens_on_its_own_address_only() -> None:
    store = listen_store("127.0.0.1")
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=5))
    client.set("key", "value")
    assert store.get("key") == b"value"
    for address in {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}:
        if not str(address).startswith("127."):
            with pytest.raises(OSError):
                socket.create_connection((str(address), store.port), timeout=2)


def test_a_process_alone_has_a_group_and_can_leave_it_twice() -> None:
    store = init_process_group(RankEnv())
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
    assert init_process_group(RankEnv()) is not None
    assert store is not None
    destroy_process_group()
    destroy_process_group()
    assert not dist.is_initialized()


def test_ranks_of_a_restart_agree_on_a_name_of_their_own() -> None:
    """What an attempt before left in the store, hellos of ranks that died before and after the answer, is not taken."""
    store = listen_store("127.0.0.1")
    names: list[dict[int, str]] = []
    for _ in range(3):
        attempt: dict[int, str] = {}

        def join(rank: int, attempt: dict[int, str] = attempt) -> None:
            client = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=10))
            attempt[rank] = agree_on_attempt(client, rank, 3, timedelta(seconds=10))

        threads = [threading.Thread(target=join, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        names.append(attempt)
        store.set("hello/1", "a word nobody waits for")
    assert [sorted(attempt) for attempt in names] == [[0, 1, 2]] * 3
    assert all(len(set(attempt.values())) == 1 for attempt in names)
    assert len({attempt[0] for attempt in names}) == 3


def test_rank_0_names_the_ranks_that_do_not_come() -> None:
    with pytest.raises(GangError, match=r"ranks 1, 2 of 3 did not arrive within 0.2 s"):
        agree_on_attempt(dist.HashStore(), 0, 3, timedelta(seconds=0.2))
    with pytest.raises(GangError, match=r"rank 0 of 3 did not answer within 0.2 s"):
        agree_on_attempt(dist.HashStore(), 2, 3, timedelta(seconds=0.2))


@pytest.mark.parametrize("source", ["torchrun", "slurm"])
def test_where_ranks_cannot_meet_is_one_sentence(source: str) -> None:
    (port,) = free_ports()
    with socket.create_server(("127.0.0.1", port)):
        place = RankEnv(world_size=2, master_port=port, source=source)
        with pytest.raises(GangError, match=f"127.0.0.1:{port} .Address already in use"):
            open_store(place, timedelta(seconds=0.2))
        with pytest.raises(GangError, match=f"127.0.0.1:{port} does not answer"):
            open_store(replace(place, rank=1), timedelta(seconds=0.5))
    with pytest.raises(GangError, match=f"127.0.0.1:{port} .*Connection refused"):
        open_store(replace(place, rank=1), timedelta(seconds=0.2))
    with pytest.raises(GangError, match="255.255.255.255:"):
        open_store(replace(place, master_addr="255.255.255.255"), timedelta(seconds=0.2))


def test_the_loopback_address_of_a_machine_s_own_name_is_not_told_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Debian's /etc/hosts."""
    ask = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *more, **most: ask(
        "127.0.1.1" if host == "debian" else host, *more, **most))  # fmt: skip
    assert addresses_of("127.0.0.1") == ["127.0.0.1"]
    assert addresses_of("localhost")[0] == "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))
        except OSError:
            pytest.skip("this machine has no route to others")
        assert addresses_of("debian") == [probe.getsockname()[0]]
