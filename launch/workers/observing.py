"""Metrics and traces of a run, where they were asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from moe_ep.errors import ConfigError
from moe_ep.launch.gangs.rank_env import RankEnv
from moe_ep.observability.metrics import MetricsSink, PrometheusSink, RaySink, Sinks
from moe_ep.observability.monitor import LayerMonitor
from moe_ep.observability.trace import trace_to


@contextmanager
def observing(
    rank_env: RankEnv, *, metrics_port: int | None, metrics_host: str, trace: Path | None
) -> Iterator[LayerMonitor | None]:
    """Serves metrics at metrics_port + local rank, and writes a trace of what happens inside the block.

    Yields:
        The monitor to start and to tell of every step, where metrics were asked for.

    Raises:
        ConfigError: the port is taken.
    """
    with ExitStack() as stack:
        monitor = None
        if metrics_port is not None:
            sink = _sink(rank_env, metrics_port + rank_env.local_rank, metrics_host)
            monitor = LayerMonitor(sink, rank=rank_env.rank, device=rank_env.device)
            stack.push(monitor)
        if trace is not None:
            # The profiler's library writes lines of its own to stderr otherwise.
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
            stack.enter_context(trace_to(trace, rank=rank_env.rank))
        yield monitor


def _sink(rank_env: RankEnv, port: int, host: str) -> MetricsSink:
    try:
        endpoint = PrometheusSink(port, host)
    except OSError as error:
        raise ConfigError(
            f"--metrics-host and --metrics-port give rank {rank_env.rank} {host}:{port}, which it cannot listen at "
            f"({error.strerror}); choose an address of this machine, and a range of ports that is free"
        ) from None
    return Sinks(endpoint, RaySink()) if rank_env.source == "ray" else endpoint
