"""The report of a generation: its summary line, and a table for the terminal."""

from __future__ import annotations

import codecs
import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_ep.bench.results import checkout_commit
from moe_ep.files import naming, parse_json, write_whole
from moe_ep.launch.cli.generate_config import GenerateConfig
from moe_ep.launch.cli.outputs import show
from moe_ep.launch.cli.report import percentile
from moe_ep.launch.gangs import mailbox, progress
from moe_ep.launch.gangs.progress import workers

if TYPE_CHECKING:
    from moe_ep.rollouts.routing_file import RoutingFile


# The routing of one prompt: ids, and weights if they are recorded.
Recorded = tuple[Any, Any]


@dataclass
class RankGeneration:
    """The results of one rank, as plain values.

    Attributes:
        about: what the summary says of the model and its layers, the same on every rank.
        completions: index, text, num_prompt_tokens, num_tokens, finish and rank of each of its prompts, and the error
            of those that failed.
        refused: index, finish, error and rank of the prompts that the model refuses.
        step_s: seconds of its steps by kind: prefill, decode (both eager), prefill_replayed, replayed (decode; both in
            CUDA graphs), serve.
        elapsed_s: from the first step to the last, the same steps on every rank.
        rank_loads: rows that it sent to each rank, by layer, over all steps since the ranks last changed.
        memory_bytes: peak memory of the GPU, or of the process on CPUs.
        routing: the recorded routing of its prompts; None if it is not recorded.
    """

    rank: int
    node: str
    device: str
    device_name: str
    about: dict[str, Any]
    load_s: float
    completions: list[dict[str, Any]]
    refused: list[dict[str, Any]]
    step_s: dict[str, list[float]]
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
        self.refused = [line for rank in ranks for line in rank.refused]
        completed = {line["index"]: line for rank in ranks for line in rank.completions}
        self.of_lost = [line for line in handed_over if line["index"] not in completed and line["finish"] != "refused"]
        everything = (*completed.values(), *self.of_lost)
        self.failed = [line for line in everything if line["finish"] == "failed"]
        self._prompts_hit = sorted(line["index"] for line in everything if line.get("tokens_hit"))

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
            **first.about,
            "launcher": self.config.launcher,
            "ep_size": len(self.ranks),
            "devices": sorted({rank.device_name for rank in self.ranks}),
            "batch_size": self.config.batch_size,
            "prompts_per_rank": [len(rank.completions) for rank in self.ranks],
            "prompts_refused": len(self.refused),
            "prompts_failed": len(self.failed),
            "tokens_per_rank": num_tokens,
            "elapsed_s": self.elapsed_s,
            "tokens_per_s_per_rank": [count / self.elapsed_s for count in num_tokens],
            "tokens_per_s": self._num_tokens / self.elapsed_s,
            "step_ms": {kind: self.step_ms(kind) for kind in first.step_s},
            "balancedness": self._balancedness(),
            "load_s": max(rank.load_s for rank in self.ranks),
            "memory_bytes_per_rank": [rank.memory_bytes for rank in self.ranks],
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
        return sum(rank.num_tokens for rank in self.ranks) + sum(line["num_tokens"] for line in self.of_lost)

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
                first = min(several, key=lambda line: line["index"])["error"]
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


# ==== Lines ====
#
# Writes the JSON lines of a generation in the order of the prompts, while it runs.

# Fields of an output line that may replace those of its prompt.
_OUTPUT_FIELDS = frozenset(
    ("kind", "index", "text", "num_prompt_tokens", "num_tokens", "finish", "error", "rank", "logprobs", "tokens_hit")
)


@dataclass(frozen=True)
class Finished:
    """How many lines, from the first prompt on, an output file has from an interrupted run; their bytes, and how many
    have no completion."""

    lines: int = 0
    size: int = 0
    failures: int = 0

    @classmethod
    def read(cls, output: Path, prompts: Sequence[dict[str, Any]]) -> Finished:
        """Counts the complete lines of prompts in an output file; ValueError for one that is not its prompt's."""
        lines = size = failures = 0
        for raw in output.read_bytes().splitlines(keepends=True) if output.is_file() else ():
            try:
                found = parse_json(raw)
            except ValueError:
                found = None
            if not raw.endswith(b"\n") or (isinstance(found, dict) and found.get("kind") == "summary"):
                break
            if not _is_line_of(found, lines, prompts):
                raise ValueError(f"its line {lines + 1} is not that of prompt {lines}; write to another file")
            failures += found.get("finish") in ("refused", "failed")
            lines, size = lines + 1, size + len(raw)
        return cls(lines, size, failures)


def _is_line_of(found: Any, index: int, prompts: Sequence[dict[str, Any]]) -> bool:
    if index >= len(prompts) or not isinstance(found, dict):
        return False
    wanted = {name: value for name, value in prompts[index].items() if name not in _OUTPUT_FIELDS}
    return (found.get("kind"), found.get("index")) == ("completion", index) and wanted.items() <= found.items()


class CompletionLines:
    """Writes a line for each prompt as soon as those before it are written, and a summary at the end.

    An interrupted run leaves complete lines. A terminal gets all lines at the end, when the progress bar is gone.

    Args:
        prompts: the fields of each prompt's line, which the output repeats.
        output: the file, or None for stdout.
        finished: lines of the file to keep; the others are replaced.
    """

    def __init__(self, prompts: Sequence[dict[str, Any]], output: Path | None, finished: Finished = Finished()) -> None:
        self.num_written = self._num_told = finished.lines
        self._prompts, self._output, self._finished = prompts, output, finished
        self._waiting: dict[int, dict[str, Any]] = {}
        self._file: FileIO | None = None
        # Escape letters that the encoding of stdout lacks.
        self._in_ascii = output is None and codecs.lookup(sys.stdout.encoding or "utf-8").name != "utf-8"
        self._held: list[str] | None = [] if output is None and sys.stdout.isatty() else None

    def take(self, completion: dict[str, Any]) -> None:
        """Takes the result of a prompt, in any order; a second one for the same prompt is ignored."""
        if completion["index"] < self._num_told:
            return
        self._waiting[completion["index"]] = completion
        while (found := self._waiting.pop(self._num_told, None)) is not None:
            line = self._prompts[self._num_told] | {"kind": "completion"} | found
            self._num_told += 1
            # UTF-8 cannot encode a lone surrogate; it becomes a JSON escape again.
            text = json.dumps(line, ensure_ascii=self._in_ascii)
            self._write(text.encode(errors="backslashreplace").decode())

    def end(self, summary: dict[str, Any]) -> None:
        """Writes the summary as the last line, and closes."""
        self._write(json.dumps(summary, allow_nan=False))
        self.close()

    def close(self) -> None:
        """Closes the file, or shows the lines that were held back. A second call does nothing."""
        if self._held:
            show("\n".join(self._held))
            self._held.clear()
        if self._file is not None:
            # A failed write has already been reported.
            with contextlib.suppress(OSError):
                self._file.close()

    def _write(self, line: str) -> None:
        if self._held is not None:
            self._held.append(line)
        elif self._output is None:
            show(line)
        else:
            if self._file is None:
                # Stays open to the end: the reader of a pipe takes a close for the end.
                self._file = self._output.open("r+b" if self._finished.lines else "wb", buffering=0)
                if self._finished.lines:
                    self._file.truncate(self._finished.size)
                    self._file.seek(self._finished.size)
            with naming(self._output):
                write_whole(self._file, f"{line}\n")
            self.num_written += 1


class CompletionRelay:
    """Passes the completions of all ranks on to the driver: rank 0 hands them over, or in an elastic gang each rank its
    own.

    A rank puts a completion into the job's store before it counts it as finished in a step, so the store holds all that
    a step counts.

    Args:
        refused: lines of the prompts that the model refuses, of all ranks.
    """

    def __init__(
        self, rank: int, num_prompts: int, refused: Sequence[dict[str, Any]] = (), *, is_elastic: bool = False
    ) -> None:
        self._rank, self._num_prompts, self._is_elastic = rank, num_prompts - len(refused), is_elastic
        self._hands_over = is_elastic or rank == 0
        self._num_left = 0
        self._collected: dict[int, int] = {}
        if not is_elastic:
            from moe_ep.distributed.store import rendezvous_store

            self._store = rendezvous_store()
        for line in refused if self._hands_over else ():
            progress.hand_over(line)

    def leave(self, completion: dict[str, Any]) -> None:
        """Passes on a completion of this rank."""
        if self._hands_over:
            progress.hand_over(completion)
        else:
            mailbox.put(self._store, f"completion/{self._rank}/{self._num_left}", completion)
            self._num_left += 1

    def collect(self, finished: Sequence[int]) -> None:
        """Passes on the completions of other ranks, given how many sequences each rank has finished."""
        if not self._hands_over:
            return
        for rank, count in () if self._is_elastic else enumerate(finished[1:], start=1):
            for number in range(self._collected.get(rank, 0), count):
                progress.hand_over(mailbox.take(self._store, f"completion/{rank}/{number}"))
            self._collected[rank] = count
        progress.report("sequences", sum(finished), self._num_prompts)
