"""Runs one rank's passes of a parallelized model, in CUDA graphs where possible: reads prompts into slots, and decodes
all slots by one token."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from moe_ep.errors import ConfigError, one_of
from moe_ep.generation.fused_modules import FusedModules
from moe_ep.generation.prompts import Buckets, PromptBatch, packed_prompts, padded_prompts
from moe_ep.generation.slot_cache import SlotCache, as_models_take, can_attend, refuses_invariance, slot_attention
from moe_ep.hf.parallelized import steps_of
from moe_ep.hf.routed_experts import PREFILL_MAX_NUM_TOKENS
from moe_ep.modular_kernel.invariant_ops import invariant_ops
from moe_ep.rollouts.recording import Choices, RoutingLog

# What a generation records of the routing: no choices, the chosen ids, or ids and weights.
Records = Literal["nothing", "ids", "weights"]
PREFILL_GRAPHS = ("auto", "on", "off")
# What a rank does in a step.
Doing = Literal["prefill", "decode", "serve"]

logger = logging.getLogger(__name__)

# Eager passes before the capture of decoding; they compile, connect and allocate what is needed once. Where ranks read
# prompts one is enough, as they have made others before.
WARM_UP_PASSES = 2
# For attention with masks: all of torch's kernels but cuDNN's, which takes tens of milliseconds to plan a new shape.
_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def check_language_model(model: Any) -> None:
    """TypeError for what is no model of transformers, and does not pass on its attributes as peft's models do."""
    if not (hasattr(model, "config") and hasattr(model, "get_input_embeddings")):
        raise TypeError(
            f"model is a {type(model).__name__}; it must be a causal language model of transformers, or what "
            f"moe_ep.parallelize returns"
        )


@contextlib.contextmanager
def batch_invariant_passes(model: Any) -> Iterator[None]:
    """A block in which a transformers model computes as the generation with batch-invariant layers does, bit for bit.

    Passes of the block take sequences without padding and without a cache, and may have gradients. The model may be
    one that `parallelize` made with batch_invariant, or a plain one in the same dtype: a trainer's log-probabilities
    are the generator's if its experts add up a token's slots in their order, or there are two of them.

    Example: the log-probabilities of a continuation that a `Generation` chose after `prompt`:

        with moe_ep.batch_invariant_passes(model):
            logits = model(input_ids=torch.cat([prompt, continuation])[None, :-1], use_cache=False).logits
            logprobs = logits[0, len(prompt) - 1 :].float().log_softmax(-1).gather(-1, continuation[:, None])

    Raises:
        ConfigError: a model whose attention cannot be computed so.
        TypeError: no model of transformers.
    """
    check_language_model(model)
    layers = DynamicCache(config=model.config).layers
    if (reason := refuses_invariance(model, layers)) is not None:
        raise ConfigError(f"model is a {type(model).__name__} and its passes cannot be batch-invariant: {reason}")
    windows = [getattr(layer, "sliding_window", None) for layer in layers]
    attention = slot_attention(model, windows, batch_invariant=True)
    # The model's own routers stay: a replay replaces their choices, and gradients flow through them.
    with FusedModules(model, routers=False).used(), invariant_ops(), attention, _experts_one_by_one(model):
        yield


@contextlib.contextmanager
def _experts_one_by_one(model: Any) -> Iterator[None]:
    """A block in which transformers' experts multiply matrices one expert after the other, and not all grouped."""
    config = model.config.get_text_config()
    before = getattr(config, "_experts_implementation", None)
    config._experts_implementation = "eager"
    try:
        yield
    finally:
        config._experts_implementation = before


class SlotDecoder:
    """Sequences in slots of a fixed-size batch.

    Every method that runs the model is this rank's part of a step that all ranks know (`StepCoordinator.planned`).

    Args:
        model: as `parallelize` returns it.
        num_slots: sequences that decode together.
        max_length: of a sequence, prompt and continuation.
        graphs: whether passes may be captured in CUDA graphs; they are where backend and experts allow it.
        records: what is recorded of each sequence's routing: nothing, "ids", or "weights" too.
        prefill_graphs: "auto" fills passes that read prompts up to a bucket of rows and captures these, where that is
            possible; "on" fills them up also where nothing is captured, as on CPUs; "off" does neither.
        prefill_tokens: rows of the largest bucket, unless the backend takes fewer.

    Attributes:
        batch_invariant: whether a sequence's logits have the same bits whatever sequences are beside it.
        can_repeat: whether a decoding pass that failed half way may be made once more: its caches are written by
            position.

    Raises:
        ConfigError: a model with a cache class of its own, one that cannot keep batch_invariant, or with prefill_graphs
            "on" one whose passes cannot be filled up.
    """

    def __init__(
        self,
        model: Any,
        num_slots: int,
        max_length: int,
        *,
        graphs: bool,
        records: Records = "nothing",
        prefill_graphs: str = "off",
        prefill_tokens: int = PREFILL_MAX_NUM_TOKENS,
    ) -> None:
        if not model._supports_default_dynamic_cache():
            raise ConfigError(
                f"a {type(model).__name__} keeps its past in a cache of its own, which sequences cannot share a batch "
                f"in; run it with transformers' generate"
            )
        self.model = model
        self.steps = steps_of(model)
        self.num_slots = num_slots
        device = model.device
        self._max_length = max_length
        self._tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._positions = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._slots = torch.arange(num_slots, device=device)
        self._active = torch.zeros(num_slots, dtype=torch.bool, device=device)
        self._cache: SlotCache | None = None
        layers = DynamicCache(config=model.config).layers
        self.batch_invariant = any(layer.batch_invariant for layer in self.steps.layers)
        if self.batch_invariant and (reason := refuses_invariance(model, layers)) is not None:
            raise ConfigError(
                f"batch_invariant is set and the model is a {type(model).__name__}: {reason}; leave it out"
            )
        self.by_table = self.batch_invariant or can_attend(model)
        self._windows = [getattr(layer, "sliding_window", None) for layer in layers]
        # Linear attention cannot separate sequences that are packed into one row.
        self.can_repeat = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)
        self._packs = self.by_table and self.can_repeat
        self._kinds = getattr(model.config.get_text_config(), "layer_types", None)
        self._fused = FusedModules(model)
        self._num_updates = self.steps.num_updates
        # The log has a row for each slot and position, and is written like the cache.
        self._log: RoutingLog | None = None
        self._recording = contextlib.ExitStack()
        if records != "nothing":
            self._log = RoutingLog(self.steps.layers, num_slots * max_length, weights=records == "weights")
            self._recording.enter_context(self._log.recording(self.steps.layers))
            self._first_places = self._slots * max_length
        if prefill_graphs not in PREFILL_GRAPHS:
            raise ValueError(one_of("prefill_graphs", prefill_graphs, PREFILL_GRAPHS))
        if prefill_graphs == "on" and (reason := self._why_not_packed()):
            raise ConfigError(f"prefill_graphs is on and {reason}; leave it at auto")
        self._graphs, self._prefill_graphs, self._prefill_tokens = graphs, prefill_graphs, prefill_tokens
        # Positions of each slot's tokens that skipped an expert since the last `take_hits`.
        self._hits: dict[int, list[int]] = {}
        if self.steps.elastic is not None:
            self.steps.elastic.on_cover(self.capture_anew)
        # Graphs that are closed are made anew.
        self._pass_graphs: PassGraphs | None = None

    def capture_anew(self) -> None:
        """Frees the captured graphs before the set of ranks changes; passes are captured again."""
        if self._pass_graphs is not None:
            self._pass_graphs.close()

    @property
    def graphs(self) -> PassGraphs:
        """The graphs of this rank's passes. The first access may make backends, a collective step of the ranks."""
        if self._pass_graphs is None or self._pass_graphs.is_closed:
            is_on, is_off = self._prefill_graphs == "on", self._prefill_graphs == "off"
            prefill = ("" if is_off else self._why_not_packed()) or self._why_not_here()
            prefill = prefill or ("prefill_graphs is off" if is_off else "")
            buckets = None
            if is_on or not prefill:
                most_rows = self._most_rows()
                prefill = prefill or self._why_not_captured(most_rows, most_rows)
                # A bucket is never a step of the backend for few tokens.
                buckets = Buckets(self.num_slots, most_rows, self._most_decode_rows())
                if not buckets.sizes:
                    prefill = prefill or f"a pass of {self.num_slots} prompts must have at most {most_rows} rows"
                if not buckets.sizes or (prefill and not is_on):
                    buckets = None
            self._pass_graphs = PassGraphs(
                buckets,
                decode=self._why_not_here() or self._why_not_captured(self.num_slots, self.num_slots),
                prefill=prefill,
                decodes_small=self.num_slots <= self._most_decode_rows(),
            )
        return self._pass_graphs

    def resume(self, slot: int, token: int, position: int) -> None:
        """Continues a slot with a token at a position, and discards what a failed pass left in it."""
        self._tokens[slot], self._positions[slot], self._active[slot] = token, position, True

    @property
    def can_replay_decode(self) -> bool:
        """Whether there is a graph of decoding, in steps in which every rank does."""
        number = self.graph_number("decode", self.num_slots, self.num_slots)
        return number is not None and bool(self.graphs.captured >> number & 1)

    def graph_number(self, doing: Doing, num_rows: int, most_rows: int) -> int | None:
        """The bit in `graphs.captured` of a rank's pass; None for one that is never captured.

        Args:
            num_rows: of that rank, the same as in `num_rows`.
            most_rows: of any rank in this step.
        """
        return self.graphs.number(doing, num_rows, is_small=most_rows <= self._most_decode_rows())

    def num_rows(self, lengths: Sequence[int]) -> int:
        """Rows of the pass that reads prompts of these lengths, padding included."""
        return self._bucket(lengths) or self._num_plain_rows(lengths)

    def rows_of_step(self, lengths: Sequence[Sequence[int]]) -> list[int]:
        """Rows of each rank's pass in a step in which ranks read prompts of these lengths; 0 where one reads none.

        All fill their passes up to the same bucket, as they wait for each other anyway, or none does.
        """
        buckets = [self._bucket(of_rank) for of_rank in lengths if of_rank]
        if None in buckets:
            return [self._num_plain_rows(of_rank) for of_rank in lengths]
        common = max(filter(None, buckets), default=0)
        return [common if of_rank else 0 for of_rank in lengths]

    def _num_plain_rows(self, lengths: Sequence[int]) -> int:
        """Rows of the pass that reads these prompts, without padding to a bucket."""
        return sum(lengths) if self._packs else len(lengths) * max(lengths, default=0)

    def _bucket(self, lengths: Sequence[int]) -> int | None:
        """The bucket that a pass is padded to; None if it is not padded."""
        buckets = self.graphs.buckets
        return None if buckets is None or not lengths else buckets.rows_of(lengths)

    def prefill(self, slots: Sequence[int], prompts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Reads a prompt `[length]` into each of the slots; returns logits `[len(slots), vocabulary]` of what follows.

        Padding goes to no expert.
        """
        device, num_rows = self._tokens.device, self.steps.num_tokens
        if not self._packs:
            batch = padded_prompts(prompts, device, slots)
        elif num_rows > sum(prompt.numel() for prompt in prompts):
            batch = packed_prompts(prompts, device, slots, num_rows, self.num_slots + 1)
        else:
            batch = packed_prompts(prompts, device, slots)
        # Nothing else has the shape that a graph of this number reads.
        logits = self._run("prefill", num_rows if batch.is_packed and batch.is_padded else 0, self._prefill_pass, batch)
        into = torch.tensor(slots, device=device)
        self._positions[into] = batch.lengths[: len(slots)]
        self._active[into] = True
        return logits[: len(slots)]

    def _prefill_pass(self, batch: PromptBatch) -> torch.Tensor:
        mask, last = batch.mask(), batch.last()
        if batch.is_packed:
            mask = as_models_take(dict.fromkeys(self._kinds or [""], mask))
            # Every layer keeps every token: the last tokens of a window would belong to one prompt only.
            prefilled = DynamicCache()
        else:
            prefilled = DynamicCache(config=self.model.config)
        positions = batch.positions
        with self._rows(batch.rows, batch.slots, positions), self._quickly(by_table=batch.is_packed):
            output = self.model(
                input_ids=batch.tokens,
                attention_mask=mask,
                position_ids=positions.clamp(min=0),
                past_key_values=prefilled,
                use_cache=True,
                logits_to_keep=last,
            )
        self._cache_like(prefilled).put(batch.slots, prefilled, positions)
        return batch.last_logits(output.logits)

    def decode(self) -> torch.Tensor:
        """Runs every slot's last token; returns logits `[num_slots, vocabulary]`, of no meaning for free slots."""
        logits = self._run("decode", self.num_slots, self.decode_pass)
        self._positions += self._active
        return logits

    def serve(self) -> None:
        """Takes part in a step in which this rank has no tokens."""
        self._run("serve", 0, self.steps.pass_without_tokens)

    def append(self, slots: slice | list[int], tokens: torch.Tensor) -> None:
        """Sets the token that each slot decodes next."""
        self._tokens[slots] = tokens

    def free(self, slot: int) -> None:
        """Frees a slot; its rows go to no expert until it is used again."""
        self._active[slot] = False
        self._positions[slot] = 0
        self._hits.pop(slot, None)

    def routing(self, slot: int, num_tokens: int) -> Choices | None:
        """The recorded routing of the first tokens of a slot's sequence; waits for the device."""
        first = slot * self._max_length
        return None if self._log is None else self._log.read(slice(first, first + num_tokens))

    def take_hits(self, slot: int) -> list[int]:
        """Positions of a slot's tokens that went without an expert that is being read again, since the call before."""
        return self._hits.pop(slot, [])

    def clear(self, slot: int) -> None:
        """Clears the state that a slot's sequence has left in the cache."""
        if self._cache is not None:
            self._cache.clear(slot)

    def close(self) -> None:
        """Frees the CUDA graphs. NCCL cannot leave a process group while graphs with its collectives exist."""
        self._recording.close()
        if self.steps.elastic is not None:
            self.steps.elastic.remove_on_cover(self.capture_anew)
        self.capture_anew()

    def how_passes_run(self) -> dict[str, str]:
        """Says of "prefill" and "decode" whether they run as CUDA graphs, and why not; also after `close`."""
        return (self._pass_graphs or self.graphs).summary()

    def _run(self, doing: Doing, num_rows: int, run: Callable[..., Any], *inputs: PromptBatch) -> Any:
        """Runs one pass of the current step, eagerly or by replaying its graph."""
        if self._num_updates != self.steps.num_updates:
            self._fused.refresh()
            self._num_updates = self.steps.num_updates
        step = self.steps.current
        if step is None:
            return run(*inputs)
        number = self.graph_number(doing, num_rows, step.most_tokens)
        return self.graphs.run(number, run, inputs, can_replay=step.can_replay)

    def decode_pass(self) -> torch.Tensor:
        cache = self._cache
        if cache is None:
            raise RuntimeError("decode was called before any prefill; prefill a slot first")
        with self._rows(self._active, self._slots, self._positions), self._quickly(by_table=self.by_table):
            output = self.model(
                input_ids=self._tokens[:, None],
                position_ids=self._positions[:, None],
                attention_mask=cache.attention_mask(self.model.dtype),
                past_key_values=cache,
                use_cache=True,
            )
        return output.logits[:, -1]

    @contextlib.contextmanager
    def _rows(self, that_count: torch.Tensor | None, slots: torch.Tensor, positions: torch.Tensor) -> Iterator[None]:
        """A block of one pass in which only the rows that count go to experts; None for all. Each row's slot and
        position say where its choices are recorded; a negative position is that of no token."""
        for layer in self.steps.layers:
            layer.precomputed.row_mask = that_count
        recorded: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._log is not None:
            if slots is self._slots:  # decoding, where each slot has a position: one small kernel
                places = self._first_places + positions
            else:
                places = (slots * self._max_length + positions).where(positions >= 0, self._log.max_tokens).flatten()
            recorded = self._log.at(places)
        skipping = None if self.steps.elastic is None else self.steps.elastic.skipping
        if skipping is not None:
            skipping.take_hits()  # of a pass that failed
        try:
            with recorded:
                yield
            if skipping is not None:
                self._note_hits(skipping.take_hits(), that_count, slots, positions)
        finally:
            for layer in self.steps.layers:
                layer.precomputed.row_mask = None

    def _note_hits(
        self, rows: list[int], that_count: torch.Tensor | None, slots: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Keeps the positions of the rows that skipped an expert; rows that do not count hold no token."""
        counts = positions >= 0 if that_count is None else (positions.flatten() >= 0) & that_count.flatten()
        flat = (slots.expand(positions.shape).flatten(), positions.flatten(), counts.flatten())
        for slot, position, row_counts in zip(*(values[rows].tolist() for values in flat), strict=True):
            if row_counts:
                self._hits.setdefault(slot, []).append(position)

    @contextlib.contextmanager
    def _quickly(self, *, by_table: bool) -> Iterator[None]:
        """A block with fused norms, routers and rotary embeddings, and with attention that needs no planning."""
        invariant = self.batch_invariant
        attention = slot_attention(self.model, self._windows, batch_invariant=invariant)
        with self._fused.used(), invariant_ops(invariant), attention if by_table else sdpa_kernel(_ATTENTION):
            yield

    def _cache_like(self, prefilled: DynamicCache) -> SlotCache:
        """The slots' cache, made when the first prompts have been read."""
        if self._cache is None:
            try:
                self._cache = SlotCache(
                    prefilled,
                    self._kinds,
                    self.num_slots,
                    self._max_length,
                    self._positions,
                    by_table=self.by_table,
                )
            except torch.OutOfMemoryError as error:
                raise ConfigError(
                    f"the cache of {self.num_slots} sequences of {self._max_length} tokens does not fit into the GPU's "
                    f"memory; decode fewer together (--batch-size) or fewer tokens (--max-new-tokens)"
                ) from error
        return self._cache

    def _most_decode_rows(self) -> int:
        """Rows of the busiest rank up to which a step uses the backend for few tokens; -1 without one."""
        return min((layer.dispatcher.most_decode_tokens for layer in self.steps.layers), default=-1)

    def _most_rows(self) -> int:
        """Rows of the largest bucket: what all backends take in one pass, and no batch balance is made for."""
        most = self._prefill_tokens
        with self.steps.pretending(most):
            for layer in self.steps.layers:
                capacity = layer.prepare_finalize.max_num_tokens_per_rank()
                if capacity is None and layer.parallel_config.spans_ranks:
                    capacity = layer.moe_config.max_num_tokens
                if (balanced_from := layer.balanced_from) is not None:
                    most = min(most, balanced_from - 1)
                most = most if capacity is None else min(most, capacity)
        return most

    def _why_not_packed(self) -> str:
        """Why prompts of a pass do not lie one behind the other; empty if they do."""
        if self._packs:
            return ""
        if self.can_repeat:
            return "the model's attention takes masks here"
        return "layers keep something else than keys and values of all tokens"

    def _why_not_here(self) -> str:
        """Why nothing is captured here; empty if something may be."""
        if not self._graphs:
            return "graphs are switched off"
        if self.steps.elastic is not None and self.steps.elastic.skipping is not None:
            return "experts are being read again"
        return "" if may_capture_on(self._tokens.device) else "there is no GPU"

    def _why_not_captured(self, num_rows: int, most_rows: int) -> str:
        """Why a pass of so many rows is not captured, in a step in which the busiest rank has most_rows; empty if it
        may be."""
        parts: dict[str, bool] = {}
        with self.steps.pretending(most_rows):
            for layer in self.steps.layers:
                capacity = layer.prepare_finalize.max_num_tokens_per_rank()
                if capacity is not None and num_rows > capacity:
                    return f"it has {num_rows} rows and a backend takes {capacity}"
                for part in (layer.prepare_finalize, layer.modular_kernel.fused_experts):
                    parts[type(part).__name__] = part.supports_cuda_graph()
        missing = [name for name, supported in parts.items() if not supported]
        return f"{', '.join(missing)} cannot be captured" if missing else ""


class PassGraphs:
    """One rank's CUDA graphs, which share a pool of memory. A pass runs eagerly at first and is captured then; where
    every rank has captured its own pass of a step, all replay.

    Passes have the same numbers on all ranks: decoding and serving, each in steps of many tokens and of few, and
    reading prompts in each bucket.

    Args:
        buckets: rows that passes over prompts are filled up to; None where they are not.
        decode, prefill: why decoding and serving, or reading, are not captured; empty if they are.
        decodes_small: steps in which all ranks decode or serve are of few tokens.

    Attributes:
        captured: bit i says whether there is a graph of pass i.
    """

    def __init__(self, buckets: Buckets | None, *, decode: str, prefill: str, decodes_small: bool) -> None:
        self.buckets = buckets
        self._numbers = {size: number for number, size in enumerate(buckets.sizes if buckets else (), 4)}
        self._decode, self._prefill = decode, prefill
        # While some ranks read prompts, the others decode, or serve, in a step of many tokens.
        self._decode_numbers = (decodes_small, 2 + decodes_small)
        self._num_eager = Counter[int]()
        self._graphs: dict[int, tuple[Any, tuple[PromptBatch, ...], Any]] = {}
        self.is_closed = False
        self.captured = 0

    def number(self, doing: Doing, num_rows: int, *, is_small: bool) -> int | None:
        """The number of a pass; None for one that is never captured."""
        return self._numbers.get(num_rows) if doing == "prefill" else 2 * (doing == "serve") + is_small

    def summary(self) -> dict[str, str]:
        """How passes run, for a report."""
        told = {"prefill": self._prefill, "decode": self._decode}
        told = {doing: f"eager, because {reason}" if reason else "CUDA graphs" for doing, reason in told.items()}
        if self.buckets is not None:
            told["prefill"] += f"; buckets of up to {self.buckets.sizes[-1]} rows"
        return told

    def run(
        self, number: int | None, run: Callable[..., Any], inputs: tuple[PromptBatch, ...], *, can_replay: bool
    ) -> Any:
        """Calls run(*inputs), or replays the graph that was captured of it."""
        if number is None:
            return run(*inputs)
        if can_replay and number in self._graphs:
            graph, held, output = self._graphs[number]
            for ours, theirs in zip(held, inputs, strict=True):
                ours.numbers.copy_(theirs.numbers)
            graph.replay()
            return output
        output = run(*inputs)
        decodes = number in self._decode_numbers
        if number not in self._graphs and not (self._decode if decodes else self._prefill):
            self._num_eager[number] += 1
            if self._num_eager[number] == (WARM_UP_PASSES if decodes else 1):
                self._capture(number, run, inputs)
        return output

    def close(self) -> None:
        """Frees the graphs."""
        for graph, _, _ in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        self.is_closed, self.captured = True, 0

    def _capture(self, number: int, run: Callable[..., Any], inputs: tuple[PromptBatch, ...]) -> None:
        held = tuple(replace(batch, numbers=batch.numbers.clone()) for batch in inputs)
        first = next((graph for graph, _, _ in self._graphs.values()), None)
        try:
            graph, output = capture_pass(lambda: run(*held), first)
        except RuntimeError as error:
            if number in self._decode_numbers:
                raise RuntimeError(
                    "a decoding pass of this model cannot be captured in a CUDA graph; pass graphs=False (--no-graphs)"
                ) from error
            # Nothing has run, and the other ranks replay only where all can.
            self._prefill = f"its capture fails ({str(error).splitlines()[0]})"
            logger.warning("prompts are read eagerly: %s", self._prefill)
            return
        self._graphs[number] = graph, held, output
        self.captured |= 1 << number


def may_capture_on(device: torch.device) -> bool:
    """Whether the device has CUDA graphs."""
    return device.type == "cuda"


def capture_pass(run: Callable[[], Any], first: Any) -> tuple[Any, Any]:
    """(graph, output): a CUDA graph of run() and what every replay of it writes to.

    Kernels do not run during capture, so ranks need not capture at the same time.

    Args:
        first: a graph whose memory this one shares, None for none. Replays follow one another, and what one has written
            is used up before the next.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    pool = None if first is None else first.pool()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        output = run()
    return graph, output
