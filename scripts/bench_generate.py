"""The MoE layers of a decoding step of `moe-ep generate`, beside the same layers run alone.

python scripts/bench_generate.py --launcher local --ep-size 4 [--tokens 8,32,128] [--json FILE]

A Qwen3-MoE checkpoint is made (Qwen3-30B's sizes, int4, few layers, contents of no meaning) and removed. Each worker
decodes as many sequences as it has tokens. A layer takes what its stages take, on the slowest rank. Alone means twice:
by `moe-ep run --graphs`, whose tokens are others and choose other experts, and one after the other in a CUDA graph on
the rows and choices that the decoding step before gave them: a step of the one, a step of the other.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import GangBenchConfig, measure_on_gang
from loading_checkpoints import FORMATS, GEOMETRIES, make_checkpoint

import moe_ep
from moe_ep.bench.results import table
from moe_ep.distributed.exchange import gather_texts, gather_values
from moe_ep.env import at_least, one_of
from moe_ep.generation.decoder import WARM_UP_PASSES, SlotDecoder
from moe_ep.hf.steps import Step
from moe_ep.launch.cli.options import checkpoint_folder, option, whole_numbers
from moe_ep.launch.cli.report import StepReport
from moe_ep.launch.cli.run_config import RunConfig
from moe_ep.launch.gangs.rank_env import RankEnv
from moe_ep.launch.workers.worker import run_worker
from moe_ep.observability import stages

STAGES = ("route", "dispatch", "experts", "combine")
WAYS = ("run", "alone", "generate")
PROMPT = 4
# By step and layer: milliseconds of each stage.
Times = list[list[dict[str, float]]]


@dataclass(frozen=True, kw_only=True)
class GenerateBenchConfig(GangBenchConfig):
    """The settings of one measurement."""

    model: Path | None = option(None, checkpoint_folder, "a checkpoint in place of the made one", "DIR")
    geometry: str = option("qwen3-30b", one_of(*GEOMETRIES), "sizes of the layers (qwen3-30b)")
    format: str = option("int4", one_of(*FORMATS), "of the experts (int4)")
    layers: int = option(4, at_least(1), "layers of the made model (4)")
    experts: int = option(128, at_least(8), "experts of a layer (128)")
    tokens: tuple[int, ...] = option((8, 32, 128), whole_numbers, "of each rank (8,32,128)")
    steps: int = option(50, at_least(2), "measured steps (50)")
    room: int = option(0, at_least(0), "tokens that a sequence has room for, if more than it needs")
    backend: str = option("auto", str, "dispatch backend, or auto (the default)")


def measure(rank_env: RankEnv, config: GenerateBenchConfig) -> list[dict[str, Any]]:
    """One worker's part: a row of the table for each number of tokens, the same on every rank."""
    on_gpu = rank_env.device != "cpu"
    rows = []
    with _checkpoint(rank_env, config) as folder, torch.inference_mode():
        for tokens in config.tokens:
            settings = RunConfig(
                model=folder,
                tokens_per_rank=(tokens,),
                steps=config.steps,
                backend=config.backend,
                graphs=on_gpu,
                verify=False,
            )
            steps: list[StepReport] = []
            alone = run_worker(rank_env, settings, steps.append)
            stage_ms = [step.stage_ms[rank_env.rank] for step in steps]
            decoded = _decode(rank_env, config, folder, tokens)
            by_rank = gather_values("times", {"run": stage_ms} | decoded)
            row = {"benchmark": "generate", "ep_size": rank_env.world_size, "tokens": tokens, "room": config.room}
            row |= {"backend": alone.backend, "experts": alone.experts_name, "steps": config.steps}
            row |= {"model": str(config.model) if config.model else f"{config.geometry} {config.format}"}
            rows.append(config.keep(row | compare(by_rank), rank_env.rank))
    return rows


def _decode(rank_env: RankEnv, config: GenerateBenchConfig, folder: Path, num_slots: int) -> dict[str, Any]:
    """Decoding with full slots: times of the layers in it, and alone on the same rows, and of each whole step."""
    device = torch.device(rank_env.device)
    on_gpu = device.type == "cuda"
    model = moe_ep.parallelize(
        folder,
        backend=config.backend,
        device=device,
        dtype=torch.bfloat16 if on_gpu else torch.float32,
        decode_max_num_tokens=num_slots if on_gpu else None,
    )
    room = max(PROMPT + config.steps + WARM_UP_PASSES, config.room)
    decoder = SlotDecoder(model, num_slots, room, graphs=on_gpu)
    layers = decoder.steps.layers
    recorders = _record_layers(layers, device)
    generator = torch.Generator().manual_seed(rank_env.rank)
    prompts = torch.randint(1, model.config.vocab_size, (num_slots, PROMPT), generator=generator)
    with decoder.steps.planned(decoder.steps.begin(prompts.numel())):
        decoder.append(slice(None), decoder.prefill(range(num_slots), list(prompts)).argmax(-1))
    given = _Given(layers)
    # Those of a graph are recorded into when it is captured, and have no times before its first replay.
    for _ in range(WARM_UP_PASSES):
        _decode_step(decoder, device)
    decoding = dict(recorders) if decoder.can_replay_decode else recorders
    alone: _Alone | None = None
    times: Times = []
    alone_times: Times = []
    step_ms: list[float] = []
    for _ in range(config.steps):
        step_ms.append(_decode_step(decoder, device))
        times.append(_stages_ms(decoding, layers))
        with decoder.steps.pretending(num_slots):
            alone = alone or _Alone(layers, given, recorders, decoder.can_replay_decode)
            alone_times.append(alone.times())
    graph = decoder.can_replay_decode
    if alone is not None:
        alone.close()
    decoder.close()
    return {"generate": times, "alone": alone_times, "step_ms": step_ms, "graph": graph}


def _decode_step(decoder: Any, device: Any) -> float:
    """One step of all ranks, every slot one token on: milliseconds of this rank's pass."""
    tokens = (decoder.num_slots,) * decoder.steps.scheduler.size
    with decoder.steps.planned(Step(tokens, decoder.can_replay_decode)):
        started = time.perf_counter()
        decoder.append(slice(None), decoder.decode().argmax(-1))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - started) * 1e3


class _Given:
    """What the model gave each layer in its last pass, a replay of a graph too."""

    def __init__(self, layers: list[Any]) -> None:
        self.args: dict[Any, tuple[Any, ...]] = {}
        self.is_kept = True
        for layer in layers:
            layer.register_forward_pre_hook(self._keep)

    def _keep(self, layer: Any, args: tuple[Any, ...]) -> None:
        # Copies that are made under capture are made anew, in the same place, by every replay.
        if self.is_kept:
            self.args[layer] = tuple(tensor.clone() for tensor in args)


class _Alone:
    """The layers one after the other, with nothing between them, each on what the model gave it last."""

    def __init__(self, layers: list[Any], given: _Given, recorders: dict[Any, Any], in_graph: bool) -> None:
        self._layers, self._given = layers, given
        self._graph = torch.cuda.CUDAGraph() if in_graph else None
        self._run()
        if self._graph is not None:
            torch.cuda.synchronize()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._run()
        # The graph records into these, whatever passes come later.
        self._recorders = recorders if self._graph is None else dict(recorders)

    def _run(self) -> None:
        self._given.is_kept = False
        for layer in self._layers:
            layer(*self._given.args[layer])
        self._given.is_kept = True

    def times(self) -> list[dict[str, float]]:
        """Milliseconds of each stage of each layer."""
        if dist.is_initialized():
            dist.barrier()
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()
        return _stages_ms(self._recorders, self._layers)

    def close(self) -> None:
        """Gives the graph up: NCCL does not leave a process group while there is one."""
        if self._graph is not None:
            self._graph.reset()


def _stages_ms(recorders: dict[Any, Any], layers: list[Any]) -> list[dict[str, float]]:
    """Milliseconds of each stage of each layer's last pass."""
    return [{name: sum(spans) for name, spans in recorders[layer].durations_ms().items()} for layer in layers]


def _record_layers(layers: list[Any], device: Any) -> dict[Any, Any]:
    """The stage recorder of each layer's last pass; of a pass that is captured, that of the graph's last replay."""
    recorders: dict[Any, Any] = {}
    open_record: list[Any] = []

    def before(layer: Any, args: Any) -> None:
        open_record.append(stages.record(device))
        recorders[layer] = open_record[-1].__enter__()

    def after(layer: Any, args: Any, output: Any) -> None:
        open_record.pop().__exit__(None, None, None)

    for layer in layers:
        layer.register_forward_pre_hook(before)
        layer.register_forward_hook(after)
    return recorders


@contextmanager
def _checkpoint(rank_env: RankEnv, config: GenerateBenchConfig) -> Iterator[Path]:
    """The checkpoint; a made one is written and removed by rank 0, and the ranks share a host."""
    if config.model is not None:
        yield config.model
        return
    folder = [""]
    if rank_env.rank == 0:
        folder = [tempfile.mkdtemp(prefix="moe-ep-bench-generate-")]
        sizes = (config.format, config.geometry, config.layers, config.experts)
        make_checkpoint(Path(folder[0]), *sizes, whole=True)
    if dist.is_initialized():
        folder = gather_texts("checkpoint", folder[0])
    try:
        yield Path(folder[0])
        if dist.is_initialized():
            dist.barrier()
    finally:
        if rank_env.rank == 0:
            shutil.rmtree(folder[0])


def compare(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over steps and layers of the slowest rank's microseconds, each way, and decoding over the others."""
    row: dict[str, Any] = {"graph": ranks[0]["graph"]}
    for way in WAYS:
        by_rank: list[Times] = [rank[way] for rank in ranks]
        places = [(step, layer) for step in range(len(by_rank[0])) for layer in range(len(by_rank[0][0]))]
        for stage in STAGES:
            slowest = [max(times[s][x].get(stage, 0.0) for times in by_rank) for s, x in places]
            row[f"{way}_{stage}_us"] = round(statistics.median(slowest) * 1e3, 1)
        whole = [max(sum(times[s][x].values()) for times in by_rank) for s, x in places]
        row[f"{way}_us"] = round(statistics.median(whole) * 1e3, 1)
    for way in ("run", "alone"):
        row[f"over_{way}"] = round(row["generate_us"] / row[f"{way}_us"], 3)
    steps_ms = zip(*(rank["step_ms"] for rank in ranks), strict=True)
    return row | {"decode_step_us": round(statistics.median(max(step) for step in steps_ms) * 1e3, 1)}


def main() -> int:
    """Prints a table."""
    _, results = measure_on_gang("bench_generate.py", __doc__ or "", GenerateBenchConfig, measure)
    if results is not None:
        columns = {"ep_size": "EP", "tokens": "T", "room": "room", "graph": "graph", "backend": "backend"}
        columns |= {f"{way}_us": way for way in WAYS}
        columns |= {"over_run": "/ run", "over_alone": "/ alone", "decode_step_us": "whole step"}
        columns |= {f"{way}_{stage}_us": f"{way} {stage}" for way in WAYS for stage in STAGES}
        print(table(results[0], columns))
    return 0


if __name__ == "__main__":
    sys.exit(main())
