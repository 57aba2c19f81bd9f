"""torchrun for real: this process as its agent, ranks that it started, two agents, and a restart."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moe_ep.errors import GangError
from moe_ep.launch.gangs import gang
from moe_ep.launch.gangs.torchrun_gang import TorchrunGang
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


def test_too_few_gpus_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gang, "num_local_gpus", lambda: 0)
    with pytest.raises(GangError, match=r"asks for 2 GPUs \(one a worker\) and there are 0 on this machine"):
        TorchrunGang(2, "cuda")


def test_several_nodes_need_a_place_to_meet() -> None:
    with pytest.raises(ValueError, match="rdzv_endpoint is missing; with num_nodes"):
        TorchrunGang(2, num_nodes=2)


DRIVER = """
import sys
from moe_ep.launch.gangs.torchrun_gang import TorchrunGang
from tests.launch import jobs
if __name__ == "__main__":
    TorchrunGang(2).run(jobs.hang, sys.argv[1])
"""


def test_workers_end_with_their_agent(tmp_path: Path) -> None:
    driver = jobs.start_python(DRIVER, str(tmp_path))
    pids = jobs.pids_in(tmp_path, 2)
    driver.kill()
    driver.communicate(timeout=60)
    assert jobs.all_end(pids)


SRUN = """
import json
from moe_ep.launch.gangs.torchrun_gang import TorchrunGang
from tests.launch import jobs
gang = TorchrunGang()
results = gang.run(jobs.describe, 10)
print(json.dumps([gang.is_driver, [[r["rank"], r["sum"], r["source"]] for r in results]]))
"""


def test_ranks_that_srun_started() -> None:
    (port,) = free_ports()
    # The port of this step of job 0.
    step = {"SLURM_JOB_ID": "0", "SLURM_STEP_ID": str(port - 10_000)}
    shared = {"SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "localhost", **step}
    ranks = [
        jobs.start_python(SRUN, **shared, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), GLOO_SOCKET_IFNAME="lo")
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=240) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert json.loads(outputs[0][0]) == [True, [[0, 21, "slurm"], [1, 21, "slurm"]]]
    assert json.loads(outputs[1][0]) == [False, []]


def start_torchrun(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        cwd=jobs.ROOT,
        env={**os.environ, "PYTHONPATH": str(jobs.ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_agents_restart_after_a_failure(tmp_path: Path) -> None:
    """Two agents of one rank each; their restart counts differ afterwards, and the ranks must meet nevertheless."""
    where = f"--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{free_ports()[0]} --rdzv-id=restart --local-addr=127.0.0.1"
    flags = f"--nnodes=2 --nproc-per-node=1 --max-restarts=2 {where}".split()
    agents = [start_torchrun(*flags, "-m", "tests.launch.restarting_job", str(tmp_path / "mark")) for _ in range(2)]
    outputs = [agent.communicate(timeout=240) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert sorted(output for output, _ in outputs) == ["", "results [4, 4]\n"]
    errors = "".join(error for _, error in outputs)
    assert errors.count("ValueError: the first attempt fails") >= 1
    assert errors.count("Connection closed by peer") == 0, errors
