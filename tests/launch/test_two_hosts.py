"""Gangs over two hosts with only a wire between them: what one finds by loopback or in shared memory is not there."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from moe_ep.checkpoint.demo import make_demo_checkpoint
from tests.launch.elastic_jobs import Job, generating, texts_alone
from tests.launch.hosts import Host, missing, two_hosts
from tests.launch.jobs import LIMIT_S

reason = missing()
pytestmark = pytest.mark.skipif(bool(reason), reason=reason)
RUN = ["run", "--device", "cpu", "--steps", "2", "--tokens-per-rank", "8"]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Host]]:
    with two_hosts(tmp_path_factory.mktemp("hosts")) as pair:
        yield pair


def nodes_of(path: Path) -> list[str]:
    """Where the ranks of a run were, which verified what it computed."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    (summary,) = [line for line in lines if line["kind"] == "summary"]
    return [rank["node"] for rank in summary["placement"]]


def test_torchrun(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl"
    where = ["--rdzv-backend=c10d", "--rdzv-endpoint=alpha:29500", "--rdzv-id=run"]
    torchrun = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", *where, "-m", "moe_ep.launch"]
    agents = [host.start(*torchrun, *RUN, "--backend", "two_level", "--json", str(out)) for host in hosts]
    outputs = [agent.communicate(timeout=LIMIT_S) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert "verified" in outputs[0][0] + outputs[1][0]
    assert sorted(nodes_of(out)) == ["alpha", "beta"]


FAILING = """
import sys
from moe_ep.errors import GangError
from moe_ep.launch.gangs.torchrun_gang import TorchrunGang
from tests.launch import jobs
if __name__ == "__main__":
    try:
        TorchrunGang(1, num_nodes=2, rdzv_endpoint="alpha:29501").run(jobs.fail, 1, "SIGKILL")
    except GangError as error:
        sys.exit(str(error))
"""


@pytest.mark.thorough  # test_torchrun_gang.py shows it of two agents on one host
def test_both_hosts_end_when_a_worker_of_one_is_killed(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    agents = [host.start(str(script)) for host in hosts]
    errors = [agent.communicate(timeout=LIMIT_S)[1] for agent in agents]
    assert [agent.returncode for agent in agents] == [1, 1], errors
    assert any("failed: the process was killed by SIGKILL" in error for error in errors), errors


LISTENING = """
from moe_ep.launch.gangs.torchrun_gang import TorchrunGang
from tests.launch import jobs
if __name__ == "__main__":
    gang = TorchrunGang(1, num_nodes=2, rdzv_endpoint="alpha:29502")
    found = gang.run(jobs.interfaces)
    print(found if gang.is_driver else [])
"""


def test_gloo_and_nccl_listen_where_the_endpoint_is(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    script = tmp_path / "listening.py"
    script.write_text(LISTENING)
    outputs = [agent.communicate(timeout=LIMIT_S) for agent in [host.start(str(script)) for host in hosts]]
    assert sorted(out for out, _ in outputs) == [f"{[('wire', '=wire')] * 2}\n", "[]\n"], outputs


def test_ray(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    alpha, beta = hosts
    out, environment = tmp_path / "run.jsonl", {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    start = ["-m", "ray.scripts.scripts", "start", "--disable-usage-stats", "--num-cpus=1"]
    command = ["-m", "moe_ep.launch", *RUN, "--address", "alpha:6379", "--ep-size", "2", "--json", str(out)]
    roles = {alpha: ["--head", "--port=6379", "--include-dashboard=false"], beta: ["--address=alpha:6379"]}
    for host, role in roles.items():
        if host is beta:  # where no node of the cluster is yet, Ray waits for one
            early = beta.start(*command, environment={**environment, "MOE_EP_DISPATCH_TIMEOUT_S": "4"})
            error = early.communicate(timeout=LIMIT_S)[1]
            assert early.returncode == 1 and "alpha:6379" in error, error
        node = host.start(*start, *role, f"--node-ip-address={host.address}", environment=environment)
        assert node.wait(timeout=LIMIT_S) == 0, node.communicate()
    driver = alpha.start(*command, environment=environment)
    output = driver.communicate(timeout=LIMIT_S)
    assert driver.returncode == 0, output
    assert sorted(nodes_of(out)) == ["alpha", "beta"]


def elastic_agents(model: Path, folder: Path, hosts: Sequence[Host], port: int, num_ranks: int) -> list[Job]:
    """Agents of one generation, the first of which has the endpoint."""
    where = ["--launcher", "torchrun", "--nnodes", str(len(hosts)), "--rdzv-endpoint", f"alpha:{port}"]
    jobs = []
    for number, host in enumerate(hosts):
        (own := folder / f"{port}.{number}").mkdir()
        # Enough tokens to be serving still when the wire is cut.
        size = ["--ep-size", str(num_ranks * len(hosts)), "--batch-size", "6", "--max-new-tokens", "192"]
        command, output = generating(model, own, "--elastic", "--device", "cpu", *where, *size)
        process = host.start("-m", "moe_ep.launch", *command, environment={"MOE_EP_DISPATCH_TIMEOUT_S": "30"})
        jobs.append(Job(process, output))
    return jobs


def check_cut_off(job: Job, num_ranks: int) -> None:
    """A worker or the agent says it first, each in words of its own."""
    said = "".join(job.lines())
    assert job.process.wait(LIMIT_S) == 1 and re.search(rf"of (the )?{num_ranks} ranks", said), said


def check_texts(lines: list[dict[str, Any]], model: Path) -> None:
    texts = texts_alone(model)
    assert [line["text"][: len(text)] for line, text in zip(lines, texts, strict=True)] == texts


def test_most_ranks_go_on_when_the_wire_is_cut(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """Of three agents, the two of one host go on without the one that leads, and then one of them alone."""
    pytest.importorskip("transformers")
    alpha, beta = hosts
    model = make_demo_checkpoint(tmp_path / "model", progress=False)
    jobs = elastic_agents(model, tmp_path, (alpha, beta, beta), 29503, 1)
    for job in jobs:
        job.until("rank [012]: ")
    leading, second, third = sorted(jobs, key=lambda job: min(job.pids))
    leading.until("serving: 3 ranks")
    with alpha.without(beta), beta.without(alpha):
        second.until("serving: [23] ranks")  # with a rank in place of the lost one, or without it yet
        agent = Path(f"/proc/{second.process.pid}/task/{second.process.pid}/children").read_text()
        os.kill(int(agent), signal.SIGKILL)
        code, lines, summary = third.end()
        check_cut_off(leading, 3)
    assert code == 0, "".join(third.said)
    check_texts(lines, model)
    assert {loss["rank"] for loss in summary["recoveries"]} >= {0, 1}
    assert all("agent" in loss["cause"] for loss in summary["recoveries"])


@pytest.mark.thorough  # the other side of the rule above
def test_at_a_tie_the_agent_that_leads_goes_on(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    alpha, beta = hosts
    model = make_demo_checkpoint(tmp_path / "model", progress=False)
    with_store, without = elastic_agents(model, tmp_path, hosts, 29504, 2)
    with_store.until("serving: 4 ranks")
    with alpha.without(beta), beta.without(alpha):
        check_cut_off(without, 4)
        code, lines, summary = with_store.end()
    assert code == 0, "".join(with_store.said)
    check_texts(lines, model)
    assert {loss["rank"] for loss in summary["recoveries"]} == {2, 3}
