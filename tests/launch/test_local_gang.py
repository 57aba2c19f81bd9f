"""The gang of local processes, for real: results, failures, deaths, ctrl-C, and nobody left behind."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moe_ep.errors import GangError
from moe_ep.launch.gangs import gang, local_gang, progress
from moe_ep.launch.gangs.gang import num_cpus, set_up_logging
from moe_ep.launch.gangs.local_gang import LocalGang
from tests.launch import jobs


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_answers_in_order(world_size: int) -> None:
    items: list[dict[str, int]] = []
    results = LocalGang(world_size).run(jobs.describe, 10, on_item=items.append)
    expected_sum = 10 * world_size + sum(range(world_size))
    assert items == [{"rank": 0, "sum": expected_sum}]
    for rank, result in enumerate(results):
        assert (result["rank"], result["world_size"], result["sum"]) == (rank, world_size, expected_sum)
        assert result["resolved"] is True
        share = max(1, num_cpus() // world_size)
        assert result["threads"] == min(share, int(result["asked_threads"] or share))
    assert len({result["pid"] for result in results} | {os.getpid()}) == world_size + 1


def test_workers_have_the_environment_of_their_gang(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("1", "2"):
        monkeypatch.setenv("MOE_EP_TEST_VALUE", value)
        assert LocalGang(1).run(jobs.variable, "MOE_EP_TEST_VALUE") == [value]
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for nccl, found in (("", "=lo"), ("eth7", "eth7")):
        monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
        if nccl:
            monkeypatch.setenv("NCCL_SOCKET_IFNAME", nccl)
        assert LocalGang(1).run(jobs.interfaces) == [("lo", found)]


STARTS_GANGS = """
from moe_ep.launch.gangs.local_gang import LocalGang
from moe_ep.errors import MoeEpError
def work(rank_env):
    return rank_env.rank
try:
    print(LocalGang(2).run(work))
except MoeEpError as error:
    print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.parametrize("how", ["stdin", "without a main guard"])
def test_a_program_that_workers_cannot_import_is_one_sentence(how: str, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(STARTS_GANGS)
    command = [sys.executable, *([] if how == "stdin" else [str(file)])]
    program = STARTS_GANGS if how == "stdin" else ""
    environment = {**os.environ, "PYTHONPATH": str(jobs.ROOT)}
    ran = subprocess.run(command, input=program, env=environment, capture_output=True, text=True, timeout=jobs.LIMIT_S)
    assert ("stdin" if how == "stdin" else "if __name__ == '__main__':") in ran.stdout, ran.stderr
    assert jobs.without_waits(ran.stderr) == "" and ran.stdout.count("\n") == 1


def test_initialising_and_leaving_twice_is_safe() -> None:
    messages = LocalGang(2).run(jobs.initialise_twice)
    assert messages[1].startswith("this process is rank 1 of 2 already and was asked to be rank 0 of 3")


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("raise", "ValueError: the tensor has a hole"),
        ("exit", "the process ended with exit code 7 before its work was done"),
        ("SIGKILL", "the process was killed by SIGKILL; if nobody sent it, the kernel did because memory ran out"),
        ("SIGSEGV", "the process was killed by SIGSEGV"),
    ],
)
def test_the_first_failure_is_named_and_ends_the_gang(how: str, cause: str, tmp_path: Path) -> None:
    with pytest.raises(GangError) as caught:
        LocalGang(3).run(jobs.fail, 1, how, str(tmp_path))
    assert time.time() - (tmp_path / "failing").stat().st_mtime < jobs.SOON_S
    message = str(caught.value)
    assert message.startswith(f"rank 1 on node {os.uname().nodename} failed: {cause}")
    assert ("in fail" in message) == (how == "raise")
    assert all_ended(tmp_path, 3)


def all_ended(directory: Path, count: int) -> bool:
    return jobs.all_end(jobs.pids_in(directory, count))


def test_a_result_that_cannot_travel_is_a_failure() -> None:
    with pytest.raises(GangError, match="rank 0 .* cannot pickle 'generator' object"):
        LocalGang(1).run(jobs.unpicklable)


def test_too_few_gpus_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gang, "num_local_gpus", lambda: 1)
    with pytest.raises(GangError, match=r"asks for 2 GPUs \(one a worker\) and there are 1 on this machine"):
        LocalGang(2, "cuda")


def test_a_rank_that_joins_takes_a_gpu_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_gang, "num_local_gpus", lambda: 2)
    assert [local_gang.freest_gpu(taken) for taken in ([], ["cuda:0"], ["cuda:0", "cuda:1", "cuda:1"])] == [
        "cuda:0", "cuda:1", "cuda:0",
    ]  # fmt: skip


def test_progress_of_rank_0_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[progress.Progress] = []
    monkeypatch.setattr(progress.ProgressDisplay, "__call__", lambda self, report: seen.append(report))
    LocalGang(2).run(jobs.report_progress)
    assert seen == [("work", 0, 3), ("work", 1, 3), ("work", 2, 3)]


DRIVER = """
import sys
from moe_ep.launch.gangs.local_gang import LocalGang
from tests.launch import jobs
if __name__ == "__main__":
    LocalGang(2).run(jobs.hang, sys.argv[1])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_their_driver(number: signal.Signals, tmp_path: Path) -> None:
    driver = jobs.start_python(DRIVER, str(tmp_path))
    pids = jobs.pids_in(tmp_path, 2)
    if number == signal.SIGINT:
        os.killpg(driver.pid, number)
    else:
        driver.kill()
    _, errors = driver.communicate(timeout=jobs.LIMIT_S)
    assert jobs.all_end(pids)
    if number == signal.SIGINT:
        assert errors.count("Traceback") == 1, errors
        assert "KeyboardInterrupt" in errors


def test_a_gang_ends_with_its_fork_server(tmp_path: Path) -> None:
    driver = jobs.start_python(DRIVER, str(tmp_path))
    pids = jobs.pids_in(tmp_path, 2)
    (server,) = {jobs.parent_of(pid) for pid in pids}
    os.kill(server, signal.SIGKILL)
    _, errors = driver.communicate(timeout=jobs.LIMIT_S)
    assert driver.returncode == 1 and "GangError" in errors
    assert jobs.all_end(pids)


def test_what_was_chosen_is_logged_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("moe_ep")
    before = logger.level
    monkeypatch.setenv("MOE_EP_LOG_LEVEL", "INFO")
    monkeypatch.setattr(logger, "handlers", [])
    try:
        set_up_logging()
        for _ in range(2):
            logger.info("chosen: %s", "reference")
            logger.warning("slow")
        set_up_logging(rank=3)
        logger.info("loaded")
    finally:
        logger.setLevel(before)
    assert capsys.readouterr().err.splitlines() == [
        "INFO moe_ep: chosen: reference",
        *["WARNING moe_ep: slow"] * 2,
        "INFO [rank 3] moe_ep: loaded",
    ]
