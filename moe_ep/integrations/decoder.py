"""One rank's passes of a parallelized model: prompts into slots, and all slots one token on, in a CUDA graph."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad
from transformers import DynamicCache

from moe_ep.errors import ConfigError
from moe_ep.integrations.divided import steps_of
from moe_ep.integrations.slot_cache import SlotCache

logger = logging.getLogger(__name__)

# Passes that run eagerly before they are captured: what is compiled, connected or allocated once is so by then.
WARM_UP_PASSES = 2
# Attention over prompts: torch's kernels but cuDNN's, which plans tens of milliseconds for every new shape.
_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class SlotDecoder:
    """Sequences in slots of a fixed-size batch.

    Every method that runs the model is this rank's part of a step that the caller has agreed on with
    `StepCoordinator.step`.

    Args:
        model: as `parallelize` returns it.
        num_slots: sequences that decode together.
        max_length: of a sequence, prompt and continuation.
        graphs: whether decoding may be captured in CUDA graphs; it is where backend and experts allow it.

    Raises:
        ConfigError: a model that keeps its past in a cache of its own.
    """

    def __init__(self, model: Any, num_slots: int, max_length: int, *, graphs: bool) -> None:
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
        self._active = torch.zeros(num_slots, dtype=torch.bool, device=device)
        self._cache: SlotCache | None = None
        graphs = graphs and self._can_capture()
        self._decode = _Captured(self._decode_pass, self.steps, num_slots, graphs)
        self._serve = _Captured(self.steps.pass_without_tokens, self.steps, num_slots, graphs)

    @property
    def can_replay_decode(self) -> bool:
        return self._decode.is_captured

    @property
    def can_replay_serve(self) -> bool:
        return self._serve.is_captured

    def prefill(self, slots: Sequence[int], prompts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Reads a prompt `[length]` into each of the slots; returns logits `[len(slots), vocabulary]` of what follows.

        Prompts of different lengths are padded on the left, so that states of linear attention begin with their first
        token and end with their last. Padding goes to no expert.
        """
        device = self._tokens.device
        lengths = torch.tensor([prompt.numel() for prompt in prompts], device="cpu")
        longest = int(lengths.max())
        tokens = torch.stack([pad(prompt, (longest - prompt.numel(), 0)) for prompt in prompts]).to(device)
        # The position of each column's token in its sequence, negative for padding.
        positions = (torch.arange(longest, device="cpu") - (longest - lengths)[:, None]).to(device)
        is_padded = int(lengths.min()) < longest
        seen = positions >= 0
        prefilled = DynamicCache(config=self.model.config)
        with self._rows(seen.flatten() if is_padded else None), sdpa_kernel(_ATTENTION):
            output = self.model(
                input_ids=tokens,
                attention_mask=seen.long() if is_padded else None,
                position_ids=positions.clamp(min=0),
                past_key_values=prefilled,
                use_cache=True,
                logits_to_keep=1,
            )
        into = torch.tensor(slots, device=device)
        self._cache_like(prefilled).put(into, prefilled, positions)
        self._positions[into] = lengths.to(device)
        self._active[into] = True
        return output.logits[:, -1]

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
        """Gives the slot up; its rows go to no expert from here on."""
        self._active[slot] = False
        self._positions[slot] = 0

    def close(self) -> None:
        """Gives up the graphs. NCCL does not leave a process group while graphs with its collectives exist."""
        self._decode.close()
        self._serve.close()

    def _decode_pass(self) -> torch.Tensor:
        cache = self._cache
        if cache is None:
            raise RuntimeError("decode was called before any prefill; prefill a slot first")
        with self._rows(self._active):
            output = self.model(
                input_ids=self._tokens[:, None],
                position_ids=self._positions[:, None],
                attention_mask=cache.attention_mask(self.model.dtype),
                past_key_values=cache,
                use_cache=True,
            )
        return output.logits[:, -1]

    @contextlib.contextmanager
    def _rows(self, that_count: torch.Tensor | None) -> Iterator[None]:
        """A block in which only these rows of the model's passes go to experts; None for all."""
        for layer in self.steps.layers:
            layer.row_mask = that_count
        try:
            yield
        finally:
            for layer in self.steps.layers:
                layer.row_mask = None

    def _cache_like(self, prefilled: DynamicCache) -> SlotCache:
        """The slots' cache, made when the first prompts have been read."""
        if self._cache is None:
            kinds = getattr(self.model.config.get_text_config(), "layer_types", None)
            try:
                self._cache = SlotCache(prefilled, kinds, self.num_slots, self._max_length, self._positions)
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
    """A pass that runs eagerly at first, and then as a CUDA graph where that is possible and every rank has its own."""

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
        """Runs eagerly from here on."""
        self._enabled = False
        if self._graph is not None:
            self._graph.reset()
        self._graph = self._output = None

    def _capture(self) -> None:
        """Nothing runs while a graph is captured, so ranks need not do it at the same time."""
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
