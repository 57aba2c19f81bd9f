"""Gangs of torchrun: this process as the agent of its node, agents that meet, ranks of torchrun itself and of srun."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moe_ep.errors import GangError
from moe_ep.launch.cli.main import main
from moe_ep.launch.gangs import gang
from moe_ep.launch.gangs.torchrun_gang import TorchrunGang
from tests.checkpoint.checkpoints import make_checkpoint
from tests.launch import jobs
from tests.ports import free_ports


def test_as_its_own_agent() -> None:
    handler = signal.getsignal(signal.SIGINT)
    gang, items = TorchrunGang(2), []
    results = gang.run(jobs.describe, 10, on_item=items.append)
    assert [(r["rank"], r["world_size"], r["sum"], r["source"]) for r in results] == [
        (0, 2, 21, "torchrun"),
        (1, 2, 21, "torchrun"),
    ]
    assert items == [{"rank": 0, "sum": 21}]
    assert gang.is_driver
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize(
    ("how", "cause"),
    [("raise", "ValueError: the tensor has a hole"), ("SIGKILL", "the process was killed by SIGKILL")],
)
def test_the_first_failure_is_named(how: str, cause: str, tmp_path: Path) -> None:
    with pytest.raises(GangError) as caught:
        TorchrunGang(2).run(jobs.fail, 1, how, str(tmp_path))
    assert str(caught.value).startswith(f"rank 1 on node {os.uname().nodename} failed: {cause}")
    assert ("in fail" in str(caught.value)) == (how == "raise")
    assert jobs.all_end(jobs.pids_in(tmp_path, 2))


def test_a_worker_that_was_stopped_ends_soon_after_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_s = 6
    monkeypatch.setenv("MOE_EP_DISPATCH_TIMEOUT_S", str(limit_s))
    with pytest.raises(GangError):
        TorchrunGang(2).run(jobs.fail, 1, "SIGSTOP", str(tmp_path))
    assert time.time() - (tmp_path / "failing").stat().st_mtime < limit_s + jobs.SOON_S
    assert jobs.all_end(jobs.pids_in(tmp_path, 2))


def test_too_few_gpus_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gang, "num_local_gpus", lambda: 0)
    with pytest.raises(GangError, match=r"asks for 2 GPUs \(one a worker\) and there are 0 on this machine"):
        TorchrunGang(2, "cuda")


def test_several_nodes_need_a_place_to_meet() -> None:
    with pytest.raises(ValueError, match="rdzv_endpoint is missing"):
        TorchrunGang(2, num_nodes=2)


DRIVER = """
import sys
from moe_ep.launch.gangs.torchrun_gang import TorchrunGang
from tests.checkpoint.checkpoints import make_checkpoint
from tests.launch import jobs
if __name__ == "__main__":
    TorchrunGang(2).run(jobs.hang, sys.argv[1])
"""


def test_workers_end_with_their_agent(tmp_path: Path) -> None:
    driver = jobs.start_python(DRIVER, str(tmp_path))
    pids = jobs.pids_in(tmp_path, 2)
    driver.kill()
    driver.communicate(timeout=jobs.LIMIT_S)
    assert jobs.all_end(pids)


def test_one_node_listens_on_loopback_only(tmp_path: Path) -> None:
    driver = jobs.start_python(DRIVER, str(tmp_path))
    pids = jobs.pids_in(tmp_path, 2)
    try:
        listening = jobs.listening_addresses([driver.pid, *pids])
    finally:
        driver.kill()
        driver.communicate(timeout=jobs.LIMIT_S)
    assert listening and {address for address, _ in listening} <= {"127.0.0.1"}


AGENT = """
import sys
from moe_ep.errors import MoeEpError
from moe_ep.launch.gangs.rank_env import RankEnv
from moe_ep.launch.gangs.torchrun_gang import TorchrunGang
from tests.checkpoint.checkpoints import make_checkpoint
from tests.launch import jobs
if __name__ == "__main__":
    endpoint, num_nodes, num_local, function, *arguments = sys.argv[1:]
    gang = TorchrunGang(int(num_local), num_nodes=int(num_nodes), rdzv_endpoint=endpoint, started=RankEnv())
    try:
        results = gang.run(getattr(jobs, function), *[int(a) if a.isdecimal() else a for a in arguments])
    except MoeEpError as error:
        sys.exit(str(error))
    if gang.is_driver:
        names = ("rank", "world_size", "local_rank", "sum", "source")
        print([(*map(r.get, names), int(r["rows"].sum())) for r in results])
"""


def start_agents(endpoint: str, *arguments: str, sizes: tuple[int, int] = (2, 2)) -> list[subprocess.Popen[str]]:
    return [jobs.start_python(AGENT, endpoint, "2", str(size), *arguments) for size in sizes]


def endpoint() -> str:
    return f"127.0.0.1:{free_ports()[0]}"


def test_two_agents() -> None:
    num_rows = 7_000_000  # results that are larger than what the store takes at once
    agents = start_agents(endpoint(), "describe", "10", str(num_rows))
    outputs = [agent.communicate(timeout=jobs.LIMIT_S) for agent in agents]
    found = [(rank, 4, rank % 2, 46, "torchrun", rank * num_rows) for rank in range(4)]
    assert sorted(out for out, _ in outputs) == ["", f"{found}\n"], outputs


@pytest.mark.parametrize("victim", ["agent", "worker", pytest.param("interrupted", marks=pytest.mark.thorough)])
def test_of_two_agents_each_says_once_who_failed(victim: str, tmp_path: Path) -> None:
    agents = start_agents(endpoint(), "hang", str(tmp_path))
    pids = jobs.pids_in(tmp_path, 4)
    owners = {pid: next(agent for agent in agents if jobs.parent_of_parent(pid) == agent.pid) for pid in pids}
    last = int((tmp_path / "3").read_text())
    killed = owners[last]
    if victim == "interrupted":
        killed.send_signal(signal.SIGINT)
    else:
        os.kill(killed.pid if victim == "agent" else last, signal.SIGKILL)
    started = time.monotonic()
    errors = {agent: agent.communicate(timeout=jobs.LIMIT_S)[1] for agent in agents}
    assert time.monotonic() - started < jobs.SOON_S
    assert jobs.all_end(pids)
    expected = "killed by SIGKILL" if victim == "worker" else "agent" if victim == "agent" else "was ended"
    for agent, error in errors.items():
        if agent is not killed or victim == "worker":
            (line,) = jobs.without_waits(error).splitlines()
            assert f"on node {os.uname().nodename} failed: " in line and expected in line
            assert ("rank 3" in line) == (victim == "worker") or "rank 2" in line
            assert agent.returncode == 1


def test_an_agent_that_ends_before_all_are_there_may_start_again() -> None:
    command = endpoint(), "3", "1", "describe", "10"

    def start_waiting() -> subprocess.Popen[str]:
        agent = jobs.start_python(AGENT, *command)
        assert agent.stderr is not None and "nodes to come" in agent.stderr.readline()
        return agent

    first, killed = start_waiting(), start_waiting()
    killed.kill()
    killed.communicate(timeout=jobs.LIMIT_S)
    agents = [first, *(jobs.start_python(AGENT, *command) for _ in range(2))]
    outputs = [agent.communicate(timeout=jobs.LIMIT_S) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0, 0], outputs
    assert outputs[0][0] == f"{[(rank, 3, 0, 33, 'torchrun', 0) for rank in range(3)]}\n"


MEETS = """
import json, sys
from moe_ep.launch.gangs.agents import Node
with Node.meet({"--nnodes": 2, "--ep-size": 2}, sys.argv[1]) as node:
    print(sorted(node.peers))
"""


def test_no_more_agents_are_taken_than_there_are_nodes() -> None:
    where = endpoint()
    agent = jobs.start_python(MEETS, where)
    assert agent.stderr is not None and "nodes to come" in agent.stderr.readline()
    host, _, port = where.rpartition(":")
    others = [socket.create_connection((host, int(port)), timeout=jobs.LIMIT_S) for _ in range(3)]
    for other in others:
        assert b"node" in other.recv(4096)
    line = json.dumps({"moe_ep_agents": 1, "node": "another", "--nnodes": 2, "--ep-size": 2}) + "\n"
    # All first lines are there when the agent looks again.
    agent.send_signal(signal.SIGSTOP)
    for other in others:
        other.sendall(line.encode())
    agent.send_signal(signal.SIGCONT)
    out, error = agent.communicate(timeout=jobs.LIMIT_S)
    assert out == "[1]\n", error
    for other in others:
        other.close()


def test_agents_of_unlike_nodes_are_refused() -> None:
    outputs = [
        agent.communicate(timeout=jobs.LIMIT_S) for agent in start_agents(endpoint(), "describe", "1", sizes=(2, 1))
    ]
    assert all("--ep-size is" in error for _, error in outputs), outputs


SRUN = """
import json
from moe_ep.launch.gangs.torchrun_gang import TorchrunGang
from tests.checkpoint.checkpoints import make_checkpoint
from tests.launch import jobs
gang = TorchrunGang()
results = gang.run(jobs.describe, 10)
print(json.dumps([gang.is_driver, [[r["rank"], r["sum"], r["source"]] for r in results]]))
"""


def srun(port: int, rank: int) -> dict[str, str]:
    """What srun -n 2 sets; the port is that of this step of job 0."""
    step = {"SLURM_JOB_ID": "0", "SLURM_STEP_ID": str(port - 10_000), "SLURM_STEP_TASKS_PER_NODE": "2"}
    shared = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": os.uname().nodename, **step}
    return {**shared, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}


def test_ranks_that_srun_started() -> None:
    (port,) = free_ports()
    ranks = [jobs.start_python(SRUN, **srun(port, rank)) for rank in range(2)]
    outputs = [rank.communicate(timeout=jobs.LIMIT_S) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert json.loads(outputs[0][0]) == [True, [[0, 21, "slurm"], [1, 21, "slurm"]]]
    assert json.loads(outputs[1][0]) == [False, []]


SRUN_HANG = """
import sys
from moe_ep.launch.gangs.torchrun_gang import TorchrunGang
from tests.checkpoint.checkpoints import make_checkpoint
from tests.launch import jobs
TorchrunGang().run(jobs.hang, sys.argv[1])
"""


@pytest.mark.thorough  # the agent of one node does too, by the same rule
def test_ranks_of_srun_on_one_node_listen_on_loopback_only(tmp_path: Path) -> None:
    (port,) = free_ports()
    ranks = [jobs.start_python(SRUN_HANG, str(tmp_path), **srun(port, rank)) for rank in range(2)]
    try:
        listening = jobs.listening_addresses(jobs.pids_in(tmp_path, 2))
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate(timeout=jobs.LIMIT_S)
    assert ("127.0.0.1", port) in listening and {address for address, _ in listening} == {"127.0.0.1"}


@pytest.mark.parametrize("launcher", ["local", "torchrun"])
def test_a_named_launcher_is_not_overruled_by_variables(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of a step that has another rank, and of an mpirun of four."""
    make_checkpoint(tmp_path)
    for name, value in {**srun(20_000, 1), "PMI_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    flags = f"--launcher {launcher} --device cpu --ep-size 1 --steps 1 --tokens-per-rank 2 --no-verify".split()
    assert main(["run", "--model", str(tmp_path), *flags]) == 0, capsys.readouterr().err
    assert f"1 worker, launcher {launcher}" in capsys.readouterr().out


def start_torchrun(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        cwd=jobs.ROOT,
        env={**os.environ, "PYTHONPATH": str(jobs.ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.thorough  # test_rank_env.py has how ranks agree on an attempt
def test_two_agents_restart_after_a_failure(tmp_path: Path) -> None:
    """Two agents of one rank each; their restart counts differ afterwards, and the ranks must meet nevertheless."""
    where = f"--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{free_ports()[0]} --rdzv-id=restart --local-addr=127.0.0.1"
    flags = f"--nnodes=2 --nproc-per-node=1 --max-restarts=2 {where}".split()
    agents = [start_torchrun(*flags, "-m", "tests.launch.restarting_job", str(tmp_path / "mark")) for _ in range(2)]
    outputs = [agent.communicate(timeout=jobs.LIMIT_S) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert sorted(output for output, _ in outputs) == ["", "results [4, 4]\n"]
    errors = "".join(error for _, error in outputs)
    assert errors.count("ValueError: the first attempt fails") >= 1
    assert errors.count("Connection closed by peer") == 0, errors
