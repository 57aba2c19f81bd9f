"""Runs one rank's passes of a parallelized model: reads prompts into slots, and decodes all slots by one token, in a
CUDA graph."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from moe_ep.errors import ConfigError
from moe_ep.generation.fused_modules import FusedModules
from moe_ep.generation.slot_cache import (
    SequenceTable,
    SlotCache,
    as_models_take,
    can_attend,
    refuses_invariance,
    slot_attention,
)
from moe_ep.hf.parallelized import steps_of
from moe_ep.modular_kernel.invariant_ops import invariant_ops
from moe_ep.rollouts.recording import Choices, RoutingLog

# What is recorded of the routing.
Records = Literal["nothing", "ids", "weights"]

logger = logging.getLogger(__name__)

# Eager passes before the capture; they compile, connect and allocate what is needed once.
WARM_UP_PASSES = 2
# For attention with masks: all of torch's kernels but cuDNN's, which takes tens of milliseconds to plan a new shape.
_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


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
    """
    layers = DynamicCache(config=model.config).layers
    if (reason := refuses_invariance(model, layers)) is not None:
        raise ConfigError(f"model is a {type(model).__name__} and its passes cannot be batch-invariant: {reason}")
    windows = [getattr(layer, "sliding_window", None) for layer in layers]
    attention = slot_attention(model, windows, batch_invariant=True)
    # The model's own routers: what replays take the place of, and what gradients go through.
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

    Every method that runs the model is this rank's part of a step that the caller has agreed on with
    `StepCoordinator.step`.

    Args:
        model: as `parallelize` returns it.
        num_slots: sequences that decode together.
        max_length: of a sequence, prompt and continuation.
        graphs: whether decoding may be captured in CUDA graphs; it is where backend and experts allow it.
        records: what is recorded of each sequence's routing: nothing, "ids", or "weights" too.

    Raises:
        ConfigError: a model with a cache class of its own, or one that cannot keep batch_invariant.
    """

    def __init__(
        self, model: Any, num_slots: int, max_length: int, *, graphs: bool, records: Records = "nothing"
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
        self._batch_invariant = any(layer.batch_invariant for layer in self.steps.layers)
        if self._batch_invariant and (reason := refuses_invariance(model, layers)) is not None:
            raise ConfigError(
                f"batch_invariant is set and the model is a {type(model).__name__}: {reason}; leave it out"
            )
        self._by_table = self._batch_invariant or can_attend(model)
        self._windows = [getattr(layer, "sliding_window", None) for layer in layers]
        # Linear attention cannot tell sequences in one row apart.
        self._repeats = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)
        self._packs = self._by_table and self._repeats
        self._kinds = getattr(model.config.get_text_config(), "layer_types", None)
        self._fused = FusedModules(model)
        # A row for each slot and position, written as the cache is.
        self._log: RoutingLog | None = None
        self._recording = contextlib.ExitStack()
        if records != "nothing":
            self._log = RoutingLog(self.steps.layers, num_slots * max_length, weights=records == "weights")
            self._recording.enter_context(self._log.recording(self.steps.layers))
        self._graphs = graphs
        self.capture_anew()

    def capture_anew(self) -> None:
        """Captures decoding once more, of other ranks' layers."""
        graphs = self._graphs and self._can_capture()
        self._decode = _Captured(self._decode_pass, self.steps, self.num_slots, graphs)
        self._serve = _Captured(self.steps.pass_without_tokens, self.steps, self.num_slots, graphs)

    @property
    def can_repeat(self) -> bool:
        """Whether a decoding pass that failed half way may be made once more: its caches are written by position."""
        return self._repeats

    def resume(self, slot: int, token: int, position: int) -> None:
        """Has a slot go on with a token at a position, whatever a pass that failed has left of it."""
        self._tokens[slot], self._positions[slot], self._active[slot] = token, position, True

    @property
    def batch_invariant(self) -> bool:
        """Whether a sequence's logits have the same bits whatever sequences are beside it."""
        return self._batch_invariant

    @property
    def can_replay_decode(self) -> bool:
        return self._decode.is_captured

    @property
    def can_replay_serve(self) -> bool:
        return self._serve.is_captured

    def num_rows(self, lengths: Sequence[int]) -> int:
        """Rows of the pass that reads prompts of these lengths, padding included."""
        return sum(lengths) if self._packs else len(lengths) * max(lengths, default=0)

    def prefill(self, slots: Sequence[int], prompts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Reads a prompt `[length]` into each of the slots; returns logits `[len(slots), vocabulary]` of what follows.

        Padding goes to no expert.
        """
        device = self._tokens.device
        if self._packs:
            batch = packed_prompts(prompts, device)
            mask = as_models_take(dict.fromkeys(self._kinds or [""], batch.mask))
            # Every layer keeps every token: the last ones of a window are those of one prompt only.
            prefilled = DynamicCache()
        else:
            batch = padded_prompts(prompts, device)
            mask = batch.mask
            prefilled = DynamicCache(config=self.model.config)
        into = torch.tensor(slots, device=device)
        with self._rows(batch.rows, into[batch.prompts], batch.positions), self._quickly(by_table=self._packs):
            output = self.model(
                input_ids=batch.tokens,
                attention_mask=mask,
                position_ids=batch.positions.clamp(min=0),
                past_key_values=prefilled,
                use_cache=True,
                logits_to_keep=batch.last,
            )
        self._cache_like(prefilled).put(into[batch.prompts], prefilled, batch.positions)
        self._positions[into] = batch.lengths
        self._active[into] = True
        return batch.last_logits(output.logits)

    def decode(self) -> torch.Tensor:
        """Runs every slot's last token; returns logits `[num_slots, vocabulary]`, of no meaning for free slots."""
        logits = self._decode.run()
        self._positions += self._active
        return logits

    def serve(self) -> None:
        """This rank's part of a step in which it has no tokens."""
        self._serve.run()

    def append(self, slots: slice | list[int], tokens: torch.Tensor) -> None:
        """Says which tokens come next."""
        self._tokens[slots] = tokens

    def free(self, slot: int) -> None:
        """Frees a slot; its rows go to no expert until it is used again."""
        self._active[slot] = False
        self._positions[slot] = 0

    def routing(self, slot: int, num_tokens: int) -> Choices | None:
        """What the first tokens of a slot's sequence chose, where it is recorded; waits for the device."""
        first = slot * self._max_length
        return None if self._log is None else self._log.read(slice(first, first + num_tokens))

    def clear(self, slot: int) -> None:
        """Forgets what a slot's sequence has left in the cache."""
        if self._cache is not None:
            self._cache.clear(slot)

    def close(self) -> None:
        """Frees the CUDA graphs. NCCL cannot leave a process group while graphs with its collectives exist."""
        self._recording.close()
        self._decode.close()
        self._serve.close()

    def _decode_pass(self) -> torch.Tensor:
        cache = self._cache
        if cache is None:
            raise RuntimeError("decode was called before any prefill; prefill a slot first")
        with self._rows(self._active, self._slots, self._positions), self._quickly(by_table=self._by_table):
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
            layer.row_mask = that_count
        try:
            if self._log is None:
                yield
                return
            places = slots * self._max_length + positions
            with self._log.at(places.where(positions >= 0, self._log.max_tokens).flatten()):
                yield
        finally:
            for layer in self.steps.layers:
                layer.row_mask = None

    @contextlib.contextmanager
    def _quickly(self, *, by_table: bool) -> Iterator[None]:
        """A block with fused norms, routers and rotary embeddings, and with attention that needs no planning."""
        invariant = self._batch_invariant
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
                    by_table=self._by_table,
                )
            except torch.OutOfMemoryError as error:
                raise ConfigError(
                    f"the cache of {self.num_slots} sequences of {self._max_length} tokens does not fit into the GPU's "
                    f"memory; decode fewer together (--batch-size) or fewer tokens (--max-new-tokens)"
                ) from error
        return self._cache

    def _can_capture(self) -> bool:
        if self._tokens.device.type != "cuda":
            return False
        parts: dict[str, bool] = {}
        with self.steps.pretending(self.num_slots):
            for layer in self.steps.layers:
                for part in (layer.prepare_finalize, layer.modular_kernel.fused_experts):
                    parts[type(part).__name__] = part.supports_cuda_graph()
        missing = [name for name, supported in parts.items() if not supported]
        if missing:
            logger.info("decoding runs eagerly: %s cannot be captured in a CUDA graph", ", ".join(missing))
        return not missing


class _Captured:
    """A pass that runs eagerly at first, and as a CUDA graph once every rank has captured its own."""

    def __init__(self, run: Callable[[], Any], steps: Any, num_tokens: int, enabled: bool) -> None:
        self._run = run
        self._steps = steps
        self._num_tokens = num_tokens
        self._enabled = enabled
        self._num_eager = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output: Any = None

    @property
    def is_captured(self) -> bool:
        return self._graph is not None

    def run(self) -> Any:
        step = self._steps.current
        if self._graph is not None and step.can_replay:
            self._graph.replay()
            return self._output
        output = self._run()
        if self._enabled and self._graph is None and step.most_tokens <= self._num_tokens:
            self._num_eager += 1
            if self._num_eager == WARM_UP_PASSES:
                self._capture()
        return output

    def close(self) -> None:
        """Frees the graph; later passes run eagerly."""
        self._enabled = False
        if self._graph is not None:
            self._graph.reset()
        self._graph = self._output = None

    def _capture(self) -> None:
        """Captures the pass. Kernels do not run during capture, so ranks need not capture at the same time."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._output = self._run()
        except RuntimeError as error:
            raise RuntimeError(
                "a decoding pass of this model cannot be captured in a CUDA graph; pass graphs=False (--no-graphs)"
            ) from error
        self._graph = graph


@dataclass(frozen=True)
class PromptBatch:
    """Prompts that one pass reads together.

    Attributes:
        tokens: int64 `[B, L]`.
        positions: int64 `[B, L]`, of each token in its prompt; negative for padding.
        prompts: int64 `[B, L]`, the number of the prompt that each token is of.
        lengths: int64 `[num_prompts]`.
        mask: the attention mask, for every kind of layer; None for a model's own causal one.
        rows: bool `[B * L]`, those that go to experts; None for all.
        last: as transformers' `logits_to_keep`, the prompts' last tokens.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    prompts: torch.Tensor
    lengths: torch.Tensor
    mask: torch.Tensor | None
    rows: torch.Tensor | None
    last: Any

    def last_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """`[num_prompts, vocabulary]` from those that a model returns; some models ignore `logits_to_keep`."""
        if logits.size(1) == self.tokens.size(1):
            logits = logits[:, self.last if isinstance(self.last, torch.Tensor) else slice(-self.last, None)]
        return logits.flatten(0, 1)


def packed_prompts(prompts: Sequence[torch.Tensor], device: torch.device) -> PromptBatch:
    """Concatenates prompts into one row, for attention that takes a `SequenceTable`."""
    # One arange for each prompt: repeat_interleave would wake all threads of the host for a few numbers.
    positions = [torch.arange(prompt.numel(), device="cpu") for prompt in prompts]
    numbers = torch.cat([torch.full_like(each, number) for number, each in enumerate(positions)])
    lengths = _lengths(prompts).to(device)
    return PromptBatch(
        tokens=torch.cat(list(prompts))[None].to(device),
        positions=torch.cat(positions)[None].to(device),
        prompts=numbers[None].to(device),
        lengths=lengths,
        mask=SequenceTable.of_prompts(lengths).at(lengths - 1),
        rows=None,
        last=lengths.cumsum(0) - 1,
    )


def padded_prompts(prompts: Sequence[torch.Tensor], device: torch.device) -> PromptBatch:
    """Gives each prompt a row of its own, padded on the left, so that states of linear attention begin with a prompt's
    first token and end with its last."""
    lengths = _lengths(prompts)
    longest = int(lengths.max())
    # The position of each column's token in its sequence, negative for padding.
    positions = (torch.arange(longest, device="cpu") - (longest - lengths)[:, None]).to(device)
    seen = positions >= 0
    is_padded = int(lengths.min()) < longest
    return PromptBatch(
        tokens=torch.stack([pad(prompt, (longest - prompt.numel(), 0)) for prompt in prompts]).to(device),
        positions=positions,
        prompts=torch.arange(len(prompts), device=device)[:, None].expand(-1, longest),
        lengths=lengths.to(device),
        mask=seen.long() if is_padded else None,
        rows=seen.flatten() if is_padded else None,
        last=1,
    )


def _lengths(prompts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([prompt.numel() for prompt in prompts], device="cpu")
