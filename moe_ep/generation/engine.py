"""Text generation over ranks, which share the prompts and each other's experts."""

from __future__ import annotations

import hashlib
import math
import random
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any, get_args

import torch
import torch.distributed as dist

from moe_ep.arguments import INTEGER_NAMES, INTEGERS
from moe_ep.distributed.exchange import gather_values
from moe_ep.distributed.membership import Membership
from moe_ep.errors import ConfigError, check_at_least, check_below, check_functions, check_whole, one_of
from moe_ep.generation.decoder import Doing, Records, SlotDecoder
from moe_ep.generation.sampling import Sampling, next_tokens, sequence_random
from moe_ep.hf.parallelized import steps_of
from moe_ep.hf.routed_experts import PREFILL_MAX_NUM_TOKENS
from moe_ep.hf.steps import Step
from moe_ep.rollouts.recording import Choices

# A step in which any rank reads prompts delays the decoding of all, so ranks wait until this share of slots is free.
FREE_SHARE = 1 / 4


@dataclass(frozen=True)
class Request:
    """A prompt.

    Attributes:
        index: its number among all prompts.
        token_ids: integer `[length]`.
        stop_ids: tokens that end its continuation, beside those that end all.
        continued: tokens that another rank has continued it by.
        skipped: positions of tokens that went without an expert there.
    """

    index: int
    token_ids: torch.Tensor
    stop_ids: tuple[int, ...] = ()
    continued: tuple[int, ...] = ()
    skipped: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        """Tokens that are read before the next one is known."""
        return self.token_ids.numel() + len(self.continued)

    @property
    def all_ids(self) -> torch.Tensor:
        """int64 `[length]`."""
        return torch.cat([self.token_ids, self.token_ids.new_tensor(self.continued)])


class PromptQueue:
    """The prompts that no rank has read yet, in order; the same on every rank, so all know which rank reads what.

    Args:
        max_tokens: rows of one rank's pass at most, padding included; a longer prompt is read alone.
        num_rows: of a pass that reads prompts of these lengths.
    """

    def __init__(
        self, requests: Sequence[Request], num_slots: int, max_tokens: int, num_rows: Callable[[Sequence[int]], int]
    ) -> None:
        self._waiting = deque(requests)
        self._num_slots, self._max_tokens, self._num_rows = num_slots, max_tokens, num_rows

    def take(self, free: Sequence[int]) -> list[list[Request]]:
        """Assigns prompts to ranks for the next step, given their free slots; none while few slots are free.

        A prompt goes to the rank with the most free slots among those whose pass has room for it.

        Example: with 4 slots each, free [1, 3] and prompts of 5, 2, 9 and 4 tokens, max_tokens 10: [[], [5, 2]], and
            rank 0 reads the prompt of 9.
        """
        num_free = sum(free)
        enough = max(1, int(FREE_SHARE * self._num_slots * len(free)))
        reads: list[list[Request]] = [[] for _ in free]
        if num_free < min(enough, len(self._waiting)):
            return reads
        while self._waiting:
            room = [rank for rank, count in enumerate(free) if count > len(reads[rank]) and self._fits(reads[rank])]
            if not room:
                break
            best = max(room, key=lambda rank: free[rank] - len(reads[rank]))
            reads[best].append(self._waiting.popleft())
        return reads

    def _fits(self, prompts: list[Request]) -> bool:
        lengths = [prompt.length for prompt in (*prompts, self._waiting[0])]
        return not prompts or self._num_rows(lengths) <= self._max_tokens


def vocabulary_of(model: Any) -> int:
    """Rows of the model's embedding; ConfigError for a model without a head, which predicts no tokens."""
    if not model.can_generate():
        raise ConfigError(
            f"model is a {type(model).__name__}, which predicts no tokens; give parallelize the model with its "
            f"head, as AutoModelForCausalLM or a path make it"
        )
    return int(model.get_input_embeddings().weight.size(0))


def check_token_ids(name: str, token_ids: Any, vocabulary: int) -> None:
    """Raises ValueError unless they are one sequence of ids that the embedding has."""
    if not isinstance(token_ids, torch.Tensor):
        raise ValueError(f"{name} is a {type(token_ids).__name__}; it must be a tensor of token ids, [length]")
    # Tokenizers give none as a float tensor.
    if token_ids.dim() != 1 or (token_ids.numel() and token_ids.dtype not in INTEGERS):
        raise ValueError(
            f"{name} is {token_ids.dtype} {tuple(token_ids.shape)}; it must be token ids of one sequence, [length] of "
            f"{INTEGER_NAMES}"
        )
    if not token_ids.numel():
        return
    least, most = (int(bound) for bound in token_ids.aminmax())
    if least < 0 or most >= vocabulary:
        raise ValueError(
            f"{name} has ids from {least} to {most}; they must be at least 0 and below the {vocabulary} rows of the "
            f"model's embedding"
        )


# What a rank does in a step.
STEP_KINDS = ("prefill", "prefill_replayed", "decode", "replayed", "serve")
# Stands for a token id where none could be chosen.
_NO_TOKEN = -1


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities (natural logarithm, f32) of one position, by the model's own logits.

    Temperature, top_k and top_p do not change them.

    Attributes:
        chosen: of the token that was taken.
        best: (token id, log-probability) of the likeliest tokens, the likeliest first.
    """

    chosen: float
    best: list[tuple[int, float]]


@dataclass
class Completion:
    """The continuation of one prompt.

    Attributes:
        token_ids: without the token that ended it.
        finish: "stop" where the model ended it, "length" where the limit did, "failed" as `error` says.
        error: why it failed; empty where it did not.
        logprobs: of each of token_ids, where they are asked for.
        routing: of every token that was fed to the model, the prompt's and all that follow but one that ended it, where
            it is recorded.
        tokens_hit: positions, in prompt and continuation, of tokens that went without an expert that they chose, as it
            was being read again.
    """

    index: int
    num_prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    finish: str = ""
    error: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    routing: Choices | None = None
    tokens_hit: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, request: Request) -> Completion:
        """With the tokens that the prompt was continued by before."""
        continued, skipped = list(request.continued), list(request.skipped)
        return cls(request.index, request.token_ids.numel(), continued, tokens_hit=skipped)


class TokenLog:
    """The tokens of all ranks' sequences in the store of their gang, so that they outlive whoever computes them.

    Each rank appends what it adds; a rank that takes a sequence over gets the same tokens where it draws some again.

    Attributes:
        work_number: of `Membership`, known when the ranks have settled; every work has entries of its own.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership, self._may_move = membership, membership.may_move
        self.work_number = membership.work_number
        self._new: list[str] = []
        # The entries written so far, for a store that may replace this one.
        self._written: list[str] = []
        self._writing = threading.Lock()
        membership.on_move(self._write_again)

    def close(self) -> None:
        """Writes the entries to no other store from here on."""
        self._membership.remove_callback(self._write_again)

    def add(self, index: int, position: int, token: int) -> None:
        """A sequence's token at a position of its continuation."""
        self._new.append(f"{index} {position} {token}")

    def skip(self, index: int, position: int) -> None:
        """A token of a sequence that went without an expert, by its position in prompt and continuation."""
        self._new.append(f"{index} {position}")

    def end(self, index: int) -> None:
        """A sequence that was finished."""
        self._new.append(f"{index}")

    def flush(self) -> None:
        """Writes the entries that were added since the last call."""
        if not self._new:
            return
        text, self._new = "".join(f"{line}\n" for line in self._new), []
        with self._writing:
            if self._may_move:
                self._written.append(text)
            try:
                self._append(text)
            except dist.DistError:
                if not self._may_move:
                    raise  # otherwise the next store gets it

    def _append(self, text: str) -> None:
        store: Any = self._membership.log.store
        store.append(self._key_of(self._membership.rank), text)

    def _write_again(self) -> None:
        with self._writing:
            self._append("".join(self._written))

    def read(self) -> tuple[dict[int, list[int]], dict[int, list[int]], set[int]]:
        """The entries of all ranks, present or gone: continuations and skipped tokens by index, and which ended."""
        tokens: dict[int, dict[int, int]] = {}
        skipped: dict[int, set[int]] = {}
        ended: set[int] = set()
        log = self._membership.log
        store = log.store
        for key in map(self._key_of, sorted(log.all_ranks())):
            told = store.get(key).decode() if store.check([key]) else ""
            for line in told.splitlines():
                index, *more = map(int, line.split())
                if len(more) == 2:
                    tokens.setdefault(index, {})[more[0]] = more[1]
                elif more:
                    skipped.setdefault(index, set()).add(more[0])
                else:
                    ended.add(index)
        found = {}
        for index, at in tokens.items():
            known = next((position for position in range(len(at)) if position not in at), len(at))
            found[index] = [at[position] for position in range(known)]
        return found, {index: sorted(positions) for index, positions in skipped.items()}, ended

    def _key_of(self, rank: int) -> str:
        return f"moe_ep/tokens/{self.work_number}/{rank}"


class Generation:
    """Continuous batching over ranks: continues prompts until all ranks are done; `run` is a collective call.

    In a step all ranks decode one token of each of their sequences, or ranks with free slots read waiting prompts into
    them, several in one pass. All ranks read in the same steps, since one that reads delays the others; a rank that has
    nothing to read then decodes, and one without sequences serves.

    Args:
        model: as `parallelize` returns it.
        requests: the prompts of all ranks, the same on each; whichever rank has slots free continues the next.
        max_new_tokens: where a sequence ends if the model does not end it.
        num_slots: sequences that decode together, the same on every rank.
        stop_ids: tokens that end a sequence; a request may have more.
        ends: says after each other token, from the tokens of the continuation so far, whether it ends its sequence.
        sampling: how tokens are chosen; the likeliest unless it says otherwise.
        max_length: where a sequence ends at the latest, prompt and continuation; None for no such end.
        prefill_tokens: tokens that a rank reads in a step at most, padding included; a longer prompt is read alone.
        graphs: whether passes may be captured in CUDA graphs.
        prefill_graphs: whether those that read prompts are ("auto" where possible, "on", "off"), see `SlotDecoder`.
        logprobs: so many of the likeliest tokens are told with the log-probabilities of each position; 0 for those of
            the chosen token alone, None for none.
        records: what is recorded of the routing of each completion: nothing, "ids" of experts, or "weights" too.
        on_progress: called before each step with the number of sequences that each rank has finished, by rank.
        on_completion: called with each of this rank's as it is finished, before on_progress counts it on any rank.
        membership: of a gang whose ranks come and go, that the model was made with: where they change, the ranks go on
            with the sequences of those that are gone, each from its last token. A completion of a rank that is lost may
            be told again, the same, by another.
        on_ranks: called when a step begins that is the first of its ranks.

    Attributes:
        times: seconds of this rank's steps from their agreement to their end, by what this rank did in them; "prefill"
            and "decode" are eager steps.

    Raises:
        ConfigError: more logprobs than the model has tokens, or what `SlotDecoder` refuses.
        ValueError: a number below 1, another word for records or prefill_graphs, a prompt without tokens, of others
            than the model has or of no tensor, or one that leaves no room below max_length; two of one number; a model
            that `parallelize` did not make; stop_ids, or tokens of a continued prompt, that the model does not have;
            from `run`, ranks with different requests.
        TypeError: requests, token ids, a number, sampling or a callback of another kind.
    """

    def __init__(
        self,
        model: Any,
        requests: Sequence[Request],
        *,
        max_new_tokens: int,
        num_slots: int,
        stop_ids: Sequence[int],
        ends: Callable[[list[int]], bool] | None = None,
        sampling: Sampling | None = None,
        max_length: int | None = None,
        prefill_tokens: int = PREFILL_MAX_NUM_TOKENS,
        graphs: bool = True,
        prefill_graphs: str = "off",
        logprobs: int | None = None,
        records: Records = "nothing",
        on_progress: Callable[[Sequence[int]], None] | None = None,
        on_completion: Callable[[Completion], None] | None = None,
        membership: Membership | None = None,
        on_ranks: Callable[[], None] | None = None,
    ) -> None:
        check_at_least(1, max_new_tokens=max_new_tokens, num_slots=num_slots, prefill_tokens=prefill_tokens)
        steps_of(model)
        vocabulary = vocabulary_of(model)
        if max_length is not None:
            check_at_least(1, max_length=max_length)
        _check_requests(requests, max_length, vocabulary)
        _check_ids("stop_ids", stop_ids, vocabulary)
        if not isinstance(sampling, (Sampling, NoneType)):
            raise TypeError(f"sampling is {sampling!r}; it must be a Sampling, or None for the likeliest tokens")
        check_functions(ends=ends, on_progress=on_progress, on_completion=on_completion, on_ranks=on_ranks)
        if logprobs is not None:
            check_at_least(0, logprobs=logprobs)
            if logprobs > vocabulary:
                raise ConfigError(f"logprobs is {logprobs} and the model has {vocabulary} tokens; ask for fewer")
        self._num_logprobs = logprobs
        longest = max((request.length for request in requests), default=0) + max_new_tokens
        self._max_length = longest if max_length is None else min(longest, max_length)
        if records not in get_args(Records):
            raise ValueError(one_of("records", records, get_args(Records)))
        self._decoder = SlotDecoder(
            model,
            num_slots,
            self._max_length,
            graphs=graphs,
            records=records,
            prefill_graphs=prefill_graphs,
            prefill_tokens=prefill_tokens,
        )
        self._requests = requests
        self._prefill_tokens = prefill_tokens
        self._prompts = PromptQueue(requests, num_slots, prefill_tokens, self._decoder.num_rows)
        self._running: list[Completion | None] = [None] * num_slots
        self._sampling = sampling or Sampling()
        # Of running sequences alone, by their index: each takes 2.5 KB.
        self._randoms: dict[int, random.Random] = {}
        # How many numbers of a sequence were drawn by ranks that are gone.
        self._num_drawn: dict[int, int] = {}
        self._random_names = self._name_randoms(requests)
        self._max_new_tokens = max_new_tokens
        self._stop_ids = {request.index: frozenset((*stop_ids, *request.stop_ids)) for request in requests}
        self._ends = ends or (lambda token_ids: False)
        self._on_progress = on_progress or (lambda finished: None)
        self._on_completion = on_completion or (lambda completion: None)
        self.completions: list[Completion] = []
        self.times: dict[str, list[float]] = {kind: [] for kind in STEP_KINDS}
        self._membership, self._on_ranks = membership, on_ranks or (lambda: None)
        self._are_new_ranks = False
        self._log: TokenLog | None = None

    def _name_randoms(self, requests: Sequence[Request]) -> dict[int, str]:
        """What determines the random numbers of each request where the batch must not matter: its tokens, and how many
        of the same tokens come before it. Elsewhere its number does."""
        names: dict[int, str] = {}
        if not self._decoder.batch_invariant or self._sampling.temperature == 0:
            return names
        seen = Counter[str]()
        for request in sorted(requests, key=lambda request: request.index):
            tokens = hashlib.sha256(repr(request.token_ids.tolist()).encode()).hexdigest()
            names[request.index] = f"{tokens} {seen[tokens]}"
            seen[tokens] += 1
        return names

    def _begin_random(self, request: Request) -> None:
        """Makes the random numbers of a sequence, behind those that other ranks have drawn."""
        if self._sampling.temperature == 0:
            return
        numbers = sequence_random(self._sampling, self._random_names.get(request.index, request.index))
        for _ in range(self._num_drawn.get(request.index, 0)):
            numbers.random()
        self._randoms[request.index] = numbers

    def _draw(self, sequence: Completion | None) -> float:
        """The next random number of a sequence; 0 where none is looked at."""
        if sequence is None or self._sampling.temperature == 0:
            return 0.0
        return self._randoms[sequence.index].random()

    def how_passes_run(self) -> dict[str, str]:
        """Says of "prefill" and "decode" whether they run as CUDA graphs, and why not."""
        return self._decoder.how_passes_run()

    @torch.inference_mode()
    def run(self) -> list[Completion]:
        """The completions that are this rank's, in the order of their numbers."""
        try:
            if self._membership is None:
                _check_alike(self._decoder.steps.scheduler.exchange(*self._checksum()))
                self._run()
            else:
                self._serve(self._membership)
        finally:
            self._decoder.close()
        return sorted(self.completions, key=lambda completion: completion.index)

    def _serve(self, membership: Membership) -> None:
        # Callbacks of a generation that is over would take part in the next one's changes of the ranks.
        self._log = TokenLog(membership)
        membership.before_change(self._decoder.capture_anew)
        membership.follow(self._regroup)
        try:
            membership.serve(self._run)
        finally:
            membership.remove_callback(self._regroup)
            membership.remove_callback(self._decoder.capture_anew)
            self._log.close()

    def _run(self) -> None:
        while (step := self._plan()) is not None:
            if self._membership is not None:
                self._membership.check()
            with self._decoder.steps.planned(step[0]):
                if self._are_new_ranks:
                    self._on_ranks()
                    self._are_new_ranks = False
                self._make(*step)

    def _regroup(self, membership: Membership) -> None:
        """Divides what is left over the present ranks, all of which call it."""
        log, decoder = self._log, self._decoder
        if log is None:
            return
        log.work_number = membership.work_number
        log.flush()
        for slot, sequence in enumerate(self._running):
            if sequence is not None and decoder.can_repeat:
                last = sequence.token_ids[-1]
                decoder.resume(slot, last, sequence.num_prompt_tokens + len(sequence.token_ids) - 1)
            else:
                self._running[slot] = None
                decoder.free(slot)
        mine: dict[str, Any] = {
            "check": self._checksum(),
            "running": [sequence.index for sequence in self._running if sequence is not None],
            "ended": [sequence.index for sequence in self.completions],
        }
        if membership.ep_rank == 0:
            mine["tokens"], mine["skipped"], ended = log.read()
            mine["ended"] += sorted(ended)
        group = membership.group
        told = [mine] if group is None else gather_values("sequences", mine, group)
        _check_alike([of_rank["check"] for of_rank in told])
        running = {index for of_rank in told for index in of_rank["running"]}
        ended = {index for of_rank in told for index in of_rank["ended"]}
        tokens = told[0]["tokens"]
        # Log-probabilities of the tokens so far were on the lost rank alone, so such sequences begin again.
        known, skipped = ({}, {}) if self._num_logprobs is not None else (tokens, told[0]["skipped"])
        waiting = [
            replace(
                request,
                continued=tuple(known.get(request.index, ())),
                skipped=tuple(skipped.get(request.index, ())),
            )
            for request in self._requests
            if request.index not in running | ended
        ]
        self._num_drawn = {request.index: len(request.continued) for request in waiting}
        self._randoms = {index: self._randoms[index] for index in mine["running"] if index in self._randoms}
        self._prompts = PromptQueue(waiting, decoder.num_slots, self._prefill_tokens, decoder.num_rows)
        self._are_new_ranks = True

    def _checksum(self) -> tuple[int, int, int]:
        """Numbers that are the same on ranks with the same requests and numbers of slots."""
        check = 0
        for request in self._requests:
            check = zlib.crc32(request.token_ids.cpu().numpy().tobytes(), zlib.crc32(b"%d" % request.index, check))
        return len(self._requests), self._decoder.num_slots, check

    def _plan(self) -> tuple[Step, list[Request]] | None:
        """The ranks' next step and what this one reads in it; None where all are through."""
        decoder, steps = self._decoder, self._decoder.steps
        told = steps.scheduler.exchange(self._running.count(None), len(self.completions), decoder.graphs.captured)
        self._on_progress([done for _, done, _ in told])
        free = [count for count, _, _ in told]
        reads = self._prompts.take(free)
        if not any(reads) and sum(free) == decoder.num_slots * len(free):
            return None
        decodes = [decoder.num_slots * (count < decoder.num_slots) for count in free]
        read = decoder.rows_of_step([[prompt.length for prompt in prompts] for prompts in reads])
        num_tokens = tuple(rows or others for rows, others in zip(read, decodes, strict=True))
        doing: list[Doing] = [
            "prefill" if rows else "decode" if others else "serve" for rows, others in zip(read, decodes, strict=True)
        ]
        numbers = [decoder.graph_number(*what, max(num_tokens)) for what in zip(doing, num_tokens, strict=True)]
        can_replay = all(
            number is not None and captured >> number & 1
            for number, (_, _, captured) in zip(numbers, told, strict=True)
        )
        return Step(num_tokens, can_replay), reads[steps.scheduler.rank]

    def _make(self, step: Step, prompts: list[Request]) -> None:
        """This rank's part of a step."""
        started = time.perf_counter()
        if prompts:
            self._read(prompts)
            kind = "prefill_replayed" if step.can_replay else "prefill"
        elif any(self._running):
            self._decode()
            kind = "replayed" if step.can_replay else "decode"
        else:
            self._decoder.serve()
            kind = "serve"
        self.times[kind].append(time.perf_counter() - started)
        if self._log is not None:
            self._log.flush()

    def _read(self, prompts: list[Request]) -> None:
        slots = [slot for slot, sequence in enumerate(self._running) if sequence is None][: len(prompts)]
        logits = self._decoder.prefill(slots, [prompt.all_ids for prompt in prompts])
        for prompt in prompts:
            self._begin_random(prompt)
        self._advance(slots, [Completion.of(prompt) for prompt in prompts], logits)

    def _decode(self) -> None:
        self._advance(None, self._running, self._decoder.decode())

    def _advance(self, slots: list[int] | None, sequences: Sequence[Completion | None], logits: torch.Tensor) -> None:
        """Adds the next token to the sequences of these slots, None for all; logits `[len(sequences), vocabulary]`."""
        # Drawn after the pass: one that fails is repeated with the same draws.
        draws = [self._draw(sequence) for sequence in sequences]
        if self._decoder.batch_invariant:
            rows = zip(_rows_alone(logits), draws, strict=True)
            tokens = torch.cat([next_tokens(row, self._sampling, [draw]) for row, draw in rows])
        else:
            tokens = next_tokens(logits, self._sampling, draws)
        self._decoder.append(slice(None) if slots is None else slots, tokens)
        logprobs: Sequence[TokenLogprobs | None] = self._logprobs(tokens, logits) or [None] * len(logits)
        found = zip(sequences, self._on_host(tokens, logits), logprobs, strict=True)
        for slot, (sequence, token, logprob) in zip(slots or range(len(logits)), found, strict=True):
            if sequence is not None:
                self._take(slot, sequence, token, logprob)

    def _logprobs(self, tokens: torch.Tensor, logits: torch.Tensor) -> list[TokenLogprobs] | None:
        """The log-probabilities of each row, if they are asked for."""
        if self._num_logprobs is None:
            return None
        if self._decoder.batch_invariant and len(logits) > 1:
            parts = (self._logprobs(*row) for row in zip(tokens.split(1), _rows_alone(logits), strict=True))
            return [found for part in parts for found in part or ()]
        values = logits.float().log_softmax(dim=-1)
        chosen = values.gather(-1, tokens[:, None]).squeeze(-1).tolist()
        best, ids = (found.tolist() for found in values.topk(self._num_logprobs, dim=-1))
        return [
            # Masked tokens have no log-probability.
            TokenLogprobs(own, [(index, value) for index, value in zip(*row, strict=True) if math.isfinite(value)])
            for own, *row in zip(chosen, ids, best, strict=True)
        ]

    def _on_host(self, tokens: torch.Tensor, logits: torch.Tensor) -> list[int]:
        """The tokens, or `_NO_TOKEN` for a row whose logits choose none: they have NaN or inf, or are -inf throughout.

        They are what the model says: no kernel of their step has waited in vain.
        """
        # One more reduction on the device, and no more transfers. The largest of a row with NaN is NaN.
        values = torch.where(logits.amax(dim=-1).isfinite(), tokens, _NO_TOKEN)
        if self._membership is not None and values.is_cuda:
            # A copy to pageable memory may keep the driver from other threads while it waits, and the one that sees
            # the ranks change ends this wait through the driver.
            torch.cuda.current_stream(values.device).synchronize()
        found = values.tolist()
        self._decoder.steps.check()
        return found

    def _take(self, slot: int, sequence: Completion, token: int, logprobs: TokenLogprobs | None) -> None:
        """Adds a sequence's next token, and ends the sequence where it is its last."""
        self._running[slot] = sequence
        for position in self._decoder.take_hits(slot):
            sequence.tokens_hit.append(position)
            if self._log is not None:
                self._log.skip(sequence.index, position)
        num_fed = sequence.num_prompt_tokens + len(sequence.token_ids)
        num_before = len(sequence.token_ids)
        sequence.finish = self._finish(sequence, token)
        if self._log is not None and len(sequence.token_ids) > num_before:
            self._log.add(sequence.index, num_before, token)
        if logprobs is not None and len(sequence.logprobs) < len(sequence.token_ids):
            sequence.logprobs.append(logprobs)
        if not sequence.finish:
            return
        if sequence.finish == "failed":
            sequence.error = (
                f"the model's logits are not finite behind {len(sequence.token_ids)} new tokens; its weights, or its "
                f"activations in this dtype, have NaN or infinity"
            )
            # A later sequence multiplies what it does not overwrite by 0, and NaN times 0 is NaN.
            self._decoder.clear(slot)
        sequence.routing = self._decoder.routing(slot, num_fed)
        self._on_completion(sequence)
        self.completions.append(sequence)
        if self._log is not None:
            self._log.end(sequence.index)
        self._running[slot] = None
        self._randoms.pop(sequence.index, None)
        self._decoder.free(slot)

    def _finish(self, sequence: Completion, token: int) -> str:
        """How the token ends its sequence, which it is added to unless it stops it; empty where it does not."""
        if token == _NO_TOKEN:
            return "failed"
        if token in self._stop_ids[sequence.index]:
            return "stop"
        sequence.token_ids.append(token)
        if self._ends(sequence.token_ids):
            return "stop"
        num_tokens = len(sequence.token_ids)
        goes_on = num_tokens < self._max_new_tokens and sequence.num_prompt_tokens + num_tokens < self._max_length
        return "" if goes_on else "length"


def _rows_alone(logits: torch.Tensor) -> list[torch.Tensor]:
    """Each row `[1, vocabulary]` in memory of its own: sums and sorts may follow the number of rows and where they
    begin."""
    return [row.clone() for row in logits.split(1)]


def _check_alike(told: Sequence[Sequence[int]]) -> None:
    if any(row != told[0] for row in told):
        raise ValueError(
            f"the ranks have {[row[0] for row in told]} requests and {[row[1] for row in told]} slots, which must "
            f"be the same, token by token; give every rank the requests of all"
        )


def _check_ids(name: str, ids: Collection[int], vocabulary: int, of: str = "") -> None:
    """Raises TypeError unless they are whole numbers, and ValueError unless the embedding has them all."""
    if not isinstance(ids, Collection):
        raise TypeError(f"{name}{of} is {ids!r}; it must be a list of token ids, which may be empty")
    for position, token in enumerate(ids):
        check_below("the rows of the model's embedding", vocabulary, **{f"{name}[{position}]{of}": token})


def _check_requests(requests: Sequence[Request], max_length: int | None, vocabulary: int) -> None:
    if not isinstance(requests, Sequence):
        raise TypeError(f"requests is a {type(requests).__name__}; it must be a list of Request")
    for position, request in enumerate(requests):
        if not isinstance(request, Request):
            raise TypeError(f"requests[{position}] is a {type(request).__name__}; it must be a Request")
        check_whole(**{f"index of requests[{position}]": request.index})
    number, count = max(
        Counter(request.index for request in requests).items(), key=lambda item: item[1], default=(0, 0)
    )
    if count > 1:
        raise ValueError(f"requests has {count} of number {number}; give each a number of its own")
    for request in requests:
        check_token_ids(f"token_ids of request {request.index}", request.token_ids, vocabulary)
        for name in ("stop_ids", "continued"):
            _check_ids(name, getattr(request, name), vocabulary, f" of request {request.index}")
        if request.length == 0 or (max_length is not None and request.length >= max_length):
            most = "" if max_length is None else f" and below max_length ({max_length})"
            raise ValueError(f"request {request.index} has {request.length} tokens; it must have at least 1{most}")
