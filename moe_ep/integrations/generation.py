"""Text generation over ranks: each continues prompts of its own, and helps with the others' experts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from moe_ep.integrations.decoder import SlotDecoder
from moe_ep.integrations.sampling import Sampling, SequenceRandom, next_tokens

# Whether a sequence ends with the last of these tokens, all that it has been continued by.
Ends = Callable[[list[int]], bool]
# (sequences that each rank has finished, by rank)
OnProgress = Callable[[Sequence[int]], None]


@dataclass(frozen=True)
class Request:
    """A prompt `[length]` and its number among all prompts."""

    index: int
    token_ids: torch.Tensor


@dataclass
class Completion:
    """What follows a prompt.

    Attributes:
        token_ids: without the token that ended it.
        finish: "stop" where the model ended it, "length" where the limit did.
    """

    index: int
    num_prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    finish: str = ""


@dataclass
class StepTimes:
    """Seconds of this rank's steps from their agreement to their end, by what this rank did in them.

    Attributes:
        replayed: decoding steps of a CUDA graph; `decode` are the eager ones.
    """

    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    replayed: list[float] = field(default_factory=list)
    serve: list[float] = field(default_factory=list)


class Generation:
    """Continues requests until all ranks are through theirs; `run` is a collective step of them.

    A step is one of three things to a rank: it reads a waiting prompt into a free slot, or moves all its sequences on
    by a token, or has none and serves. A finished sequence's slot goes to the next prompt.

    Args:
        model: as `parallelize` returns it.
        max_new_tokens: where a sequence ends if the model does not end it.
        num_slots: sequences that decode together, the same on every rank.
        stop_ids: tokens that end a sequence.
        ends: says after each other token whether it ends its sequence.
        sampling: how tokens are chosen; the likeliest unless it says otherwise.
        max_length: where a sequence ends at the latest, prompt and continuation; None for no such end.
        graphs: whether decoding may be captured in CUDA graphs.
        on_completion: called with each of this rank's as it is finished, before on_progress counts it on any rank.

    Raises:
        ValueError: a prompt without tokens, or one that leaves no room below max_length.
    """

    def __init__(
        self,
        model: Any,
        requests: Sequence[Request],
        *,
        max_new_tokens: int,
        num_slots: int,
        stop_ids: Sequence[int],
        ends: Ends | None = None,
        sampling: Sampling | None = None,
        max_length: int | None = None,
        graphs: bool = True,
        on_progress: OnProgress | None = None,
        on_completion: Callable[[Completion], None] | None = None,
    ) -> None:
        _check_lengths(requests, max_length)
        longest = max((request.token_ids.numel() for request in requests), default=0) + max_new_tokens
        self._max_length = longest if max_length is None else min(longest, max_length)
        self._decoder = SlotDecoder(model, num_slots, self._max_length, graphs=graphs)
        self._waiting = deque(requests)
        self._running: list[Completion | None] = [None] * num_slots
        self._sampling = sampling or Sampling()
        self._randoms = {request.index: SequenceRandom(self._sampling, request.index) for request in requests}
        self._max_new_tokens = max_new_tokens
        self._stop_ids = frozenset(stop_ids)
        self._ends = ends or (lambda token_ids: False)
        self._on_progress = on_progress or (lambda finished: None)
        self._on_completion = on_completion or (lambda completion: None)
        self.completions: list[Completion] = []
        self.times = StepTimes()

    @torch.inference_mode()
    def run(self) -> list[Completion]:
        """The completions of this rank's requests, in the order of their numbers."""
        try:
            self._run_steps()
        finally:
            self._decoder.close()
        return sorted(self.completions, key=lambda completion: completion.index)

    def _run_steps(self) -> None:
        decoder = self._decoder
        while True:
            slot = self._running.index(None) if None in self._running else None
            prompt = self._waiting[0] if self._waiting and slot is not None else None
            decodes = prompt is None and any(self._running)
            num_tokens = prompt.token_ids.numel() if prompt else decoder.num_slots if decodes else None
            ready = decoder.can_replay_decode if decodes else prompt is None and decoder.can_replay_serve
            with decoder.steps.step(num_tokens, can_replay=ready, done=len(self.completions)) as step:
                if step is None:
                    return
                started = time.perf_counter()
                self._on_progress(step.done)
                if prompt is not None and slot is not None:
                    self._waiting.popleft()
                    self._read(prompt, slot)
                    spent = self.times.prefill
                elif decodes:
                    self._decode()
                    spent = self.times.replayed if step.can_replay else self.times.decode
                else:
                    decoder.serve()
                    spent = self.times.serve
                spent.append(time.perf_counter() - started)

    def _read(self, prompt: Request, slot: int) -> None:
        logits = self._decoder.prefill(slot, prompt.token_ids)
        token = next_tokens(logits[None], self._sampling, [self._randoms[prompt.index].draw()])[0]
        self._decoder.append(slot, token)
        self._running[slot] = Completion(prompt.index, prompt.token_ids.numel())
        self._take(slot, int(token))

    def _decode(self) -> None:
        draws = [0.0 if sequence is None else self._randoms[sequence.index].draw() for sequence in self._running]
        tokens = next_tokens(self._decoder.decode(), self._sampling, draws)
        self._decoder.append(slice(None), tokens)
        for slot, token in enumerate(tokens.tolist()):
            if self._running[slot] is not None:
                self._take(slot, token)

    def _take(self, slot: int, token: int) -> None:
        """Adds a sequence's next token, and ends the sequence where it is its last."""
        sequence = self._running[slot]
        if sequence is None:
            return
        if token in self._stop_ids:
            sequence.finish = "stop"
        else:
            sequence.token_ids.append(token)
            num_tokens = len(sequence.token_ids)
            if self._ends(sequence.token_ids):
                sequence.finish = "stop"
            elif num_tokens < self._max_new_tokens and sequence.num_prompt_tokens + num_tokens < self._max_length:
                return
            else:
                sequence.finish = "length"
        self._on_completion(sequence)
        self.completions.append(sequence)
        self._running[slot] = None
        self._decoder.free(slot)


def _check_lengths(requests: Sequence[Request], max_length: int | None) -> None:
    for request in requests:
        length = request.token_ids.numel()
        if length == 0 or (max_length is not None and length >= max_length):
            most = "" if max_length is None else f" and below max_length ({max_length})"
            raise ValueError(f"request {request.index} has {length} tokens; it must have at least 1{most}")
