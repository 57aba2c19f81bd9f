"""Gangs whose ranks come and go: real workers that are killed and stopped while they generate."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch.distributed as dist

import moe_ep
from moe_ep.checkpoint.demo import make_demo_checkpoint
from moe_ep.distributed.membership import Membership, MembershipLog
from moe_ep.errors import ConfigError, GangError
from moe_ep.launch.gangs import control
from moe_ep.launch.gangs.control import ControlServer
from moe_ep.launch.gangs.elastic import ElasticOutcomes
from moe_ep.launch.gangs.gang import Outcome
from moe_ep.layer.elastic import ElasticConfig
from tests.launch.elastic_jobs import Job, generating, texts_alone
from tests.launch.jobs import LIMIT_S, SOON_S, all_end, all_vanish, session_pids, shared_files, start_moe_ep
from tests.ports import free_ports


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_demo_checkpoint(tmp_path_factory.mktemp("demo") / "model", progress=False)


@pytest.fixture(scope="module")
def texts(demo: Path) -> list[str]:
    return texts_alone(demo)


@pytest.fixture(scope="module", autouse=True)
def asked_in_vain() -> Iterator[Future[str]]:
    """A request to what listens and says nothing. It waits for seconds, in which the other tests run."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as threads:
        yield threads.submit(control.ask, f"127.0.0.1:{server.getsockname()[1]}", "any", "join")


def start(output: Path, *command: str, deadline_s: float = 60) -> Job:
    variables = {"MOE_EP_DISPATCH_TIMEOUT_S": str(deadline_s), "OMP_NUM_THREADS": "1"}
    return Job(start_moe_ep(*command, "--elastic", "--device", "cpu", **variables), output)


def generate(model: Path, folder: Path, *options: str, deadline_s: float = 60) -> Job:
    command, output = generating(model, folder, *options)
    return start(output, *command, deadline_s=deadline_s)


def test_ranks_that_are_killed_and_stopped(demo: Path, texts: list[str], tmp_path: Path) -> None:
    """Tokens go without the experts of a rank that is lost, while those are read again."""
    shared, routing = shared_files(), tmp_path / "routing.safetensors"
    job = generate(
        demo, tmp_path, "--launcher", "local", "--ep-size", "3", "--when-uncovered", "skip",
        "--return-routed-experts", str(routing), deadline_s=15,
    )  # fmt: skip
    job.until("serving: 3 ranks")
    os.kill(job.pids[0], signal.SIGKILL)
    job.until("serving: 2 ranks")
    os.kill(job.pids[1], signal.SIGSTOP)
    job.until("serving: 1 ranks")
    code, lines, summary = job.end()
    assert code == 0, "".join(job.said)
    assert [line["index"] for line in lines] == list(range(len(texts)))
    hit = [line["index"] for line in lines if line.get("tokens_hit")]
    assert hit and summary["prompts_hit"] == hit
    # All tokens are fed to the model but the last, and that one too where another ends the text.
    fed = [line["num_prompt_tokens"] + line["num_tokens"] - (line["finish"] == "length") for line in lines]
    for line, text, most in zip(lines, texts, fed, strict=True):
        assert line["index"] in hit or line["text"] == text
        assert all(0 <= position < most for position in line.get("tokens_hit", ())), (line["tokens_hit"], most)
    killed, stopped = summary["recoveries"]
    assert (killed["rank"], stopped["rank"]) == (0, 1)
    assert "SIGKILL" in killed["cause"] and killed["detected_s"] < stopped["detected_s"] < SOON_S
    assert killed["experts_read"] and killed["bytes_read"]
    assert killed["detected_s"] <= killed["serving_s"] <= killed["covered_s"]
    # Each prompt was recorded whole, whichever ranks have had it.
    found = moe_ep.read_routed_experts(routing)
    assert [len(found[index]) for index in range(len(texts))] == fed
    assert all(int(ids.min()) >= 0 for ids in found.values())
    assert all_vanish(shared_files() - shared)


def test_actors_join_and_leave_and_are_killed_and_replaced(demo: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    shared = shared_files()
    job = start(
        tmp_path / "none", "run", "--model", str(demo), "--launcher", "ray", "--ep-size", "2", "--max-ranks", "3",
        "--min-ranks", "2", "--spare-slots", "16", "--tokens-per-rank", "8", "--steps", "1000000",
    )  # fmt: skip
    job.until("serving: 2 ranks")
    asked = ask(job, "join")
    job.until("serving: 3 ranks")
    assert asked.wait(LIMIT_S) == 0
    os.kill(job.pids[0], signal.SIGKILL)
    job.until("serving: 2 ranks")
    if 3 not in job.pids:
        job.until("rank 3: ")
    os.kill(job.pids[3], signal.SIGKILL)  # which was to replace it
    job.until("serving: 3 ranks")
    asked = ask(job, "leave", "2")
    job.until(r"moe-ep: rank 2 is out \(was told to leave\)")
    assert asked.wait(LIMIT_S) == 0
    os.kill(job.pids[1], signal.SIGUSR1)
    job.until("moe-ep: rank 1 does not leave: .*--min-ranks is 2")
    os.kill(job.pids[1], signal.SIGKILL)
    job.until(r"moe-ep run: .*--min-ranks \(2\): .*rank 1: .*SIGKILL")
    assert job.process.wait(LIMIT_S) == 1 and all_end(session_pids(job.process.pid))
    assert set(job.pids) == {0, 1, 2, 3, 4}
    assert all_vanish(shared_files() - shared)


def test_a_run_goes_on_balances_and_is_verified(demo: Path, tmp_path: Path) -> None:
    output, steps, port = tmp_path / "run.jsonl", 20, free_ports(3)[0]
    job = start(
        output, "run", "--model", str(demo), "--launcher", "local", "--ep-size", "3", "--tokens-per-rank", "8",
        "--steps", str(steps), "--spare-slots", "8", "--when-uncovered", "skip", "--eplb", "--routing", "zipf:1.2",
        "--json", str(output), "--metrics-port", str(port),
    )  # fmt: skip
    job.until("serving: 3 ranks")
    os.kill(job.pids[1], signal.SIGKILL)
    job.until("serving: 2 ranks")
    told = scraped(port)
    code, lines, summary = job.end()
    assert code == 0, "".join(job.said)
    found = {line.split("{")[0]: float(line.split()[-1]) for line in told.splitlines() if line[0] != "#"}
    assert (found["moe_ep_ranks"], found["moe_ep_recoveries_total"]) == (2, 1)
    assert found["moe_ep_recovery_seconds_count"] == 1
    assert sorted({line["step"] for line in lines}) == list(range(summary["steps"])) and summary["steps"] >= 2 * steps
    assert {line["phase"] for line in lines} >= {"before", "after"}
    assert summary["eplb"]["plans_made"] + summary["eplb"]["plans_skipped"]
    assert summary["verify"]["passed"] and summary["ep_size"] == 2
    assert all(len(hit["by_rank"]) == 2 and any(hit["by_rank"]) for hit in summary["tokens_hit"])
    (loss,) = summary["recoveries"]
    assert loss["rank"] == 1


def test_numbers_of_a_run_are_those_of_the_ranks_of_each_step(demo: Path, tmp_path: Path) -> None:
    output, port = tmp_path / "run.jsonl", free_ports(3)[0]
    job = start(
        output, "run", "--model", str(demo), "--launcher", "local", "--ep-size", "3", "--tokens-per-rank", "8",
        "--steps", "150", "--no-verify", "--json", str(output), "--metrics-port", str(port),
    )  # fmt: skip
    job.until("serving: 3 ranks")
    wait_until(lambda: "moe_ep_balancedness{" in scraped(port + 1))  # a step has ended
    os.kill(job.pids[0], signal.SIGKILL)
    job.until("serving: 2 ranks")

    def tokens_of_ranks() -> list[float]:
        told = dict(line.rsplit(" ", 1) for line in scraped(port + 1).splitlines())
        return [float(told[f'moe_ep_rank_tokens{{expert_rank="{rank}",rank="1"}}']) for rank in range(3)]

    # Of 8 tokens with 4 experts each, once a step of the two ranks was sampled.
    wait_until(lambda: (found := tokens_of_ranks())[0] == 0 and sum(found) == 32, SOON_S)
    code, lines, summary = job.end()
    assert code == 0, "".join(job.said)
    steps = {line["step"]: line for line in lines}.values()
    assert {len(step["tokens_per_rank"]) for step in steps} == {2, 3}
    num_tokens = sum(8 * len(step["tokens_per_rank"]) for step in steps)
    seconds = sum(step["step_ms"] for step in steps) / 1e3
    assert summary["mean_tokens_per_s"] == pytest.approx(num_tokens / seconds)


def scraped(port: int) -> str:
    """The metrics of a rank."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=LIMIT_S) as answer:
        return answer.read().decode()


def wait_until(condition: Callable[[], bool], limit_s: float = 20) -> None:
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@contextmanager
def driven(
    threads: ThreadPoolExecutor, store: dist.Store, num_ranks: int, members: list[Membership]
) -> Iterator[tuple[Future[Any], MembershipLog]]:
    """Drives a gang whose members live in this process, for as long as the block; the future has its results."""
    over = threading.Event()

    def poll(limit_s: float) -> list[tuple[int, Outcome]]:
        return [(rank, Outcome(rank)) for rank in log.latest().ranks] if over.wait(limit_s) else []

    outcomes = ElasticOutcomes(
        store, range(num_ranks), ElasticConfig(), lambda rank: None, lambda rank: None, lambda item: None,
        replaces=False,
    )  # fmt: skip
    log = MembershipLog(store)  # the line above has written epoch 0
    gang = threads.submit(outcomes.run, poll)
    try:
        yield gang, log
    finally:
        over.set()
        for member in members:
            member.close()


def test_a_rank_that_was_refused_leaves_when_it_asks_again() -> None:
    """The others have no memory for its experts at first. Ranks that come later prepare for nothing."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    has_room = threading.Event()
    prepared: list[tuple[int, int]] = []
    members: list[Membership] = []

    def start_member(rank: int) -> Membership:
        def prepare(leaving: int) -> None:
            prepared.append((rank, leaving))
            if not has_room.is_set():
                raise MemoryError("no memory for its experts")

        membership = Membership(store, rank)
        membership.before_leaving(prepare)
        members.append(membership)
        return membership

    def come_and_go(rank: int) -> None:
        """A member that stays until it has looked for leaving ranks."""
        membership = start_member(rank)
        wait_until(lambda: log.last_seen(rank) is not None)
        first = log.last_seen(rank)
        wait_until(lambda: log.last_seen(rank) != first)
        membership.close()

    with ThreadPoolExecutor(1) as threads, driven(threads, store, 3, members) as (gang, log):
        for rank in range(3):
            start_member(rank)
        members[1].ask_to_leave()
        wait_until(lambda: len(prepared) == 2 and not log.asked_to_leave())
        assert log.latest().ranks == (0, 1, 2)
        come_and_go(3)
        has_room.set()
        members[1].ask_to_leave()
        wait_until(lambda: log.latest().ranks == (0, 2))
        come_and_go(4)
        assert sorted(prepared) == [(0, 1), (0, 1), (2, 1), (2, 1)]
    assert gang.result(LIMIT_S)[0] == [0, 2]


def test_each_request_that_a_rank_leaves_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    is_asked = threading.Event()
    members: list[Membership] = []
    said = ""

    def until_said(what: str, count: int = 1) -> None:
        def is_said() -> bool:
            nonlocal said
            said += capsys.readouterr().err
            return said.count(what) >= count

        wait_until(is_said)

    with ThreadPoolExecutor(3) as threads, driven(threads, store, 2, members) as (gang, _):
        for rank in range(2):
            members.append(Membership(store, rank))
            members[rank].before_leaving(lambda leaving: wait_until(is_asked.is_set))
        until_said("control: 127.0.0.1:")
        address = said.split("control: ")[1].split()[0]
        asked = [threads.submit(control.ask, address, None, "leave", 1) for _ in range(2)]
        until_said(f"waiting for the gang at {address}", 2)
        is_asked.set()
        assert [answer.result(SOON_S) for answer in asked] == ["rank 1 left: 1 worker"] * 2
    assert gang.result(LIMIT_S)[0] == [0]


def ask(job: Job, *request: str) -> subprocess.Popen[str]:
    """A request to the gang, at the address that it has said."""
    address = next(line.split()[1] for line in job.said if line.startswith("control: "))
    return start_moe_ep(*request, "--address", address)


def test_a_request_needs_the_token() -> None:
    with ControlServer() as server:
        with pytest.raises(GangError, match="token"):
            control.ask(server.address, "of another gang", "leave", 0)
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(control.ask, server.address, None, "leave", 3)
            requests = []
            while not requests:
                requests = list(server.requests())
            assert [(request.kind, request.rank) for request in requests] == [("leave", 3)]
            requests[0].answer("done")
            assert asked.result() == "done"
    with pytest.raises(ConfigError, match=server.address):
        control.ask(server.address, "any", "join")


def test_a_request_that_the_gang_never_answers_ends_with_it() -> None:
    with ThreadPoolExecutor(1) as threads:
        with ControlServer() as server:
            asked = threads.submit(control.ask, server.address, None, "join")
            wait_until(lambda: bool(list(server.requests())))
        with pytest.raises(GangError):
            asked.result(timeout=SOON_S)


@pytest.mark.parametrize("said", [b"HTTP/1.0 400 Bad\r\n\r\n", b"{}\n", b"3\n", b""])
def test_what_listens_and_is_no_gang_is_not_waited_for(said: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as threads:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        asked = threads.submit(control.ask, address, "any", "join")
        connection, _ = server.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(said)
        with pytest.raises(ConfigError, match=address):
            asked.result(timeout=LIMIT_S)


def test_what_listens_and_says_nothing_is_given_up(asked_in_vain: Future[str]) -> None:
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1"):
        asked_in_vain.result(timeout=LIMIT_S)
