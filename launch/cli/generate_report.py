"""The report of a generation: its summary line, and a table for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from moe_ep.bench.results import checkout_commit
from moe_ep.launch.cli.generate_config import GenerateConfig
from moe_ep.launch.cli.report import percentile
from moe_ep.launch.gangs.progress import workers

if TYPE_CHECKING:
    from moe_ep.rollouts.routing_file import RoutingFile


# The routing of one prompt: ids, and weights if they are recorded.
Recorded = tuple[Any, Any]


@dataclass
class RankGeneration:
    """The results of one rank, as plain values.

    Attributes:
        completions: index, text, num_prompt_tokens, num_tokens, finish and rank of each of its prompts, and the error
            of those that failed.
        refused: index, finish, error and rank of the prompts that the model refuses.
        not_applied: settings of the model's generation_config.json that change which token is the likeliest, and that
            are ignored.
        step_s: seconds of its steps by kind: prefill, decode (both eager), prefill_replayed, replayed (decode; both in
            CUDA graphs), serve.
        passes: whether prefill and decode run in CUDA graphs, or why not.
        elapsed_s: from the first step to the last, the same steps on every rank.
        rank_loads: rows that it sent to each rank, by layer, over all steps since the ranks last changed.
        memory_bytes: peak memory of the GPU, or of the process on CPUs.
        routing: the recorded routing of its prompts; None if it is not recorded.
    """

    rank: int
    node: str
    device: str
    device_name: str
    backends: tuple[str, str]
    experts_name: str
    dtype: str
    model: str
    num_layers: int
    num_experts: int
    load_s: float
    versions: dict[str, str]
    completions: list[dict[str, Any]]
    refused: list[dict[str, Any]]
    not_applied: dict[str, Any]
    step_s: dict[str, list[float]]
    passes: dict[str, str]
    elapsed_s: float
    rank_loads: list[list[int]]
    memory_bytes: int
    routing: RoutingFile | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that it generated."""
        return sum(completion["num_tokens"] for completion in self.completions)


class GenerationReport:
    """The report over all ranks.

    Args:
        recoveries: an account of each lost rank (`Gang.run_elastic`).
        handed_over: completions that arrived during the run, including those of lost ranks.
    """

    def __init__(
        self,
        config: GenerateConfig,
        command: str,
        ranks: Sequence[RankGeneration],
        recoveries: Sequence[dict[str, Any]] = (),
        handed_over: Sequence[dict[str, Any]] = (),
    ) -> None:
        self.config, self.command, self.ranks = config, command, list(ranks)
        self.recoveries = list(recoveries)
        self.elapsed_s = max(rank.elapsed_s for rank in ranks)
        self.refused = [told for rank in ranks for told in rank.refused]
        completed = {told["index"]: told for rank in ranks for told in rank.completions}
        self.of_lost = [told for told in handed_over if told["index"] not in completed and told["finish"] != "refused"]
        everything = (*completed.values(), *self.of_lost)
        self.failed = [told for told in everything if told["finish"] == "failed"]
        self._prompts_hit = sorted(told["index"] for told in everything if told.get("tokens_hit"))

    def routing(self, handed_over: Mapping[int, Recorded]) -> RoutingFile:
        """The recorded routing of all prompts.

        Args:
            handed_over: what ranks of an elastic gang recorded, by prompt, including those that were lost.
        """
        files = [rank.routing for rank in self.ranks if rank.routing is not None]
        ids = {index: each for file in files for index, each in file.ids.items()}
        weights = {index: each for file in files for index, each in file.weights.items()}
        for index, recorded in handed_over.items():
            ids[index] = recorded[0]
            if recorded[1] is not None:
                weights[index] = recorded[1]
        return replace(files[0], ids=dict(sorted(ids.items())), weights=dict(sorted(weights.items())))

    def step_ms(self, kind: str) -> dict[str, float] | None:
        """Median and p99 over ranks and steps; None without such steps."""
        times = [1e3 * seconds for rank in self.ranks for seconds in rank.step_s[kind]]
        if not times:
            return None
        return {"median": percentile(times, 0.5), "p99": percentile(times, 0.99), "steps": len(times)}

    def summary(self) -> dict[str, Any]:
        """The last JSON line."""
        first = self.ranks[0]
        num_tokens = [rank.num_tokens for rank in self.ranks]
        return {
            "kind": "summary",
            "model": first.model,
            "num_layers": first.num_layers,
            "num_experts": first.num_experts,
            "launcher": self.config.launcher,
            "ep_size": len(self.ranks),
            "backend": {"prefill": first.backends[0], "decode": first.backends[1]},
            "experts": first.experts_name,
            "dtype": first.dtype,
            "devices": sorted({rank.device_name for rank in self.ranks}),
            "batch_size": self.config.batch_size,
            "prompts_per_rank": [len(rank.completions) for rank in self.ranks],
            "prompts_refused": len(self.refused),
            "prompts_failed": len(self.failed),
            "not_applied": first.not_applied,
            "tokens_per_rank": num_tokens,
            "elapsed_s": self.elapsed_s,
            "tokens_per_s_per_rank": [count / self.elapsed_s for count in num_tokens],
            "tokens_per_s": self._num_tokens / self.elapsed_s,
            "step_ms": {kind: self.step_ms(kind) for kind in first.step_s},
            "passes": first.passes,
            "balancedness": self._balancedness(),
            "load_s": max(rank.load_s for rank in self.ranks),
            "memory_bytes_per_rank": [rank.memory_bytes for rank in self.ranks],
            "versions": first.versions,
            "commit": checkout_commit(),
            "command": self.command,
            "recoveries": self.recoveries,
            "prompts_hit": self._prompts_hit,
        }

    def _balancedness(self) -> float:
        """Mean over maximum (`moe_ep.eplb.balancedness`) of the rows that all ranks sent to each rank, over all layers.

        Computed without torch, whose import would dominate the driver's time.
        """
        rows_by_layer = zip(*(rank.rank_loads for rank in self.ranks), strict=True)
        by_layer = [[sum(of_rank) for of_rank in zip(*rows, strict=True)] for rows in rows_by_layer]
        busiest = sum(max(loads) for loads in by_layer)
        return sum(sum(loads) / len(loads) for loads in by_layer) / busiest if busiest else 1.0

    @property
    def _num_tokens(self) -> int:
        """Generated tokens, including those of lost ranks."""
        return sum(rank.num_tokens for rank in self.ranks) + sum(told["num_tokens"] for told in self.of_lost)

    def lines(self) -> Iterator[str]:
        """The report for the terminal."""
        summary = self.summary()
        prefill, decode = summary["backend"]["prefill"], summary["backend"]["decode"]
        yield f"model   {summary['model']}"
        yield (
            f"        {summary['num_layers']} MoE layers of {summary['num_experts']} experts, loaded in "
            f"{summary['load_s']:.2f} s"
        )
        yield f"gang    {workers(len(self.ranks))}, launcher {self.config.launcher}, on {', '.join(summary['devices'])}"
        yield (
            f"layers  backend {prefill if prefill == decode else f'{prefill} for prompts, {decode} for decoding'}, "
            f"experts {summary['experts']}, {summary['dtype']}"
        )
        yield f"prefill {summary['passes']['prefill']}"
        yield f"decode  {summary['passes']['decode']}"
        yield ""
        yield f"{'rank':>4}{'prompts':>9}{'tokens':>8}{'tokens/s':>12}{'memory':>13}  where"
        for rank, speed in zip(self.ranks, summary["tokens_per_s_per_rank"], strict=True):
            memory = f"{rank.memory_bytes / 2**20:,.0f} MiB"
            yield (
                f"{rank.rank:>4}{len(rank.completions):>9}{rank.num_tokens:>8}{speed:>12,.1f}{memory:>13}  "
                f"{rank.node}, {rank.device}"
            )
        yield ""
        yield from self._times(summary["step_ms"])
        yield (
            f"{summary['tokens_per_s']:,.1f} tokens/s ({self._num_tokens} in {self.elapsed_s:.2f} s), "
            f"balancedness {summary['balancedness']:.3f}"
        )
        if summary["not_applied"]:
            settings = ", ".join(f"{name} ({value})" for name, value in summary["not_applied"].items())
            yield f"not applied, of generation_config.json: {settings}"
        for loss in self.recoveries:
            yield (
                f"rank {loss['rank']} is out ({loss['cause']}): found after {loss['detected_s']:.2f} s, served again "
                f"after {loss['serving_s']:.2f} s, {loss['experts_read']} experts read again"
            )
        total = len(self.refused) + sum(summary["prompts_per_rank"]) + len(self.of_lost)
        for what, several in (("refused", self.refused), ("failed at", self.failed)):
            if several:
                first = min(several, key=lambda told: told["index"])["error"]
                yield f"{what} {len(several)} of {total} prompts: {first}"

    @staticmethod
    def _times(step_ms: dict[str, dict[str, float] | None]) -> Iterator[str]:
        yield f"{'ms of a step of one rank':<26}{'median':>10}{'p99':>10}{'steps':>8}"
        for kind, label in (
            ("prefill", "reading prompts, eager"),
            ("prefill_replayed", "reading, CUDA graph"),
            ("decode", "decoding, eager"),
            ("replayed", "decoding, CUDA graph"),
            ("serve", "serving other ranks"),
        ):
            if times := step_ms[kind]:
                yield f"{label:<26}{times['median']:>10.2f}{times['p99']:>10.2f}{times['steps']:>8}"
