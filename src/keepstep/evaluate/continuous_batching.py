"""Continuous batching: many prompts share a few rows, and a row that has ended takes the next prompt.

Shape legend: b rows, k rows that take a prompt, t tokens, v vocabulary.

What a request gets is a function of the weights, its prompt and its seed; the other requests change rounding at most.
All that a token needs is computed on the device in fixed shapes. The host asks only now and then which rows have ended,
so its work does not grow with the batch, and on a GPU a step is one CUDA graph.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention import SDPBackend, sdpa_kernel

from keepstep.core.errors import UsageError
from keepstep.evaluate.draw import Sampler
from keepstep.evaluate.kept_prompts import shared_length
from keepstep.models.attention_context import SlotCache
from keepstep.models.transformer import Transformer

_PREFILL_TOKENS, _EXTENDED_TOKENS = 1 << 16, 1 << 14
"""Most tokens of the prompts that enter together, with their padding, and of those that continue, which need a mask."""
_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class Request:
    """A prompt to continue, and what its draws start from."""

    prompt: Sequence[int]
    max_new_tokens: int
    seed: int = 0
    drawn: int = 0
    """Numbers of the seed that are used already: for the tokens at the prompt's end, if it is an answer's beginning."""

    def draws(self, count: int) -> Tensor:
        """Numbers in [0, 1) for the next tokens, made on the CPU: a GPU's generator gives other numbers."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.rand(self.drawn + count, generator=generator, dtype=torch.float64)[self.drawn :]


@dataclass(frozen=True)
class Generated:
    """New tokens with the one that ended them, and, if they were drawn, the log-probability of each."""

    tokens: list[int]
    log_probabilities: list[float]
    ended: bool
    """False where the limit of tokens cut it off."""


@dataclass(frozen=True)
class FollowUp:
    """What comes after an answer: a further request, whose length is known beforehand at most.

    It is computed on the row of the answer, from the first token on that the row does not hold already.
    """

    ask: Callable[[int, Generated], Request | None]
    """Gets the number of a request and its result. Further requests are numbered as they come."""
    most_tokens: int
    """Of a prompt and its answer."""
    most_new_tokens: int


@torch.no_grad()
def generate_batch(
    model: Transformer,
    requests: Sequence[Request],
    *,
    rows: int,
    sampler: Sampler = Sampler(),  # noqa: B008 - frozen
    stop_tokens: Collection[int] = (),
    on_ended: Callable[[int], None] = lambda _: None,
    agree: Callable[[bool], bool] = bool,
    follow_up: FollowUp | None = None,
) -> list[Generated]:
    """Continue all prompts, at most `rows` at a time. `on_ended` is called with the number of those that have ended.

    With sharded weights all processes call this together, and `agree` says whether any of them is still busy: they call
    the model equally often.
    """
    if not requests or not all(request.prompt for request in requests):
        raise UsageError("a prompt has no tokens", "start from the end-of-text token to generate from nothing")
    batch = _Batch(model, requests, min(rows, len(requests)), sampler, stop_tokens, follow_up)
    with _kernels():
        while agree(batch.is_busy()):
            batch.advance()
            on_ended(batch.ended)
    return batch.results()


@contextmanager
def _kernels() -> Iterator[None]:
    """All kernels of attention, because decoding needs a mask, and eager blocks, because shapes vary.

    Writes go to a place of their own each: they are deterministic without torch's slower kernels.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        with sdpa_kernel(_ATTENTION), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        torch.use_deterministic_algorithms(deterministic)


@dataclass(frozen=True)
class _Rows:
    """Where each row stands, on the device."""

    tokens_b: Tensor
    """What each row decodes next."""
    written_b: Tensor
    most_b: Tensor
    running_b: Tensor
    output_bt: Tensor
    """New tokens. The last column takes what rows choose after their end."""
    chance_bt: Tensor
    draws_bt: Tensor

    @classmethod
    def empty(cls, rows: int, most: int, device: torch.device) -> _Rows:
        """Rows without a request."""
        numbers = torch.zeros(rows, dtype=torch.int64, device=device)
        columns = torch.zeros(rows, most + 1, device=device)
        return cls(numbers, numbers.clone(), numbers.clone(), numbers.bool(), columns.long(), columns, columns.double())

    def kept(self, rows_k: Tensor) -> _Rows:
        """These rows alone."""
        return _Rows(*(getattr(self, name)[rows_k] for name in self.__dataclass_fields__))


class _Batch:
    """Rows on the device, and the prompts that wait for them."""

    def __init__(
        self,
        model: Transformer,
        requests: Sequence[Request],
        rows: int,
        sampler: Sampler,
        stop_tokens: Collection[int],
        follow_up: FollowUp | None,
    ) -> None:
        self._model, self._requests, self._sampler, self._follow_up = model, list(requests), sampler, follow_up
        device = self._device = next(model.parameters()).device
        sharded = isinstance(model, FSDPModule)
        # Asking the GPU costs as much as a step, so it is asked seldom; sharded processes must take equal turns.
        self._steps_a_turn = 8 if device.type == "cuda" and not sharded else 1
        # A window of its own costs a graph; one that is too long costs keys that are read for nothing.
        self._window_unit = 256 if device.type == "cuda" else 16
        self._most = max(request.max_new_tokens for request in requests)
        self._longest = max(len(request.prompt) + request.max_new_tokens - 1 for request in requests)
        if follow_up is not None:
            self._most = max(self._most, follow_up.most_new_tokens)
            self._longest = max(self._longest, follow_up.most_tokens)
        self._stops = torch.tensor(sorted(stop_tokens), dtype=torch.int64, device=device)
        self._waiting = deque(range(len(requests)))
        self._results: list[Generated | None] = [None] * len(requests)
        self.ended = 0
        self._graphs = _Graphs() if device.type == "cuda" and not sharded else None
        self._allocate(rows)

    def _allocate(self, rows: int) -> None:
        device, steps = self._device, self._steps_a_turn
        capacity = -(-(self._longest + steps) // self._window_unit) * self._window_unit
        self._cache = SlotCache(self._model.config.layers, rows, capacity, device)
        self._numbers: list[int | None] = [None] * rows
        """The request of each row."""
        self._next: list[tuple[int, int] | None] = [None] * rows
        """The request that continues each row, if one follows its answer, and how many of the row's tokens it keeps."""
        self._held = [0] * rows
        """Tokens that each row holds, as far as the host knows."""
        self._rows = _Rows.empty(rows, self._most, device)

    def is_busy(self) -> bool:
        """Whether any request has not ended."""
        return self.ended < len(self._requests)

    def results(self) -> list[Generated]:
        """What all requests got."""
        return [result for result in self._results if result is not None]

    def advance(self) -> None:
        """Let prompts enter if enough rows are free, otherwise write a few tokens; one forward where shards are."""
        idle = [row for row, number in enumerate(self._numbers) if number is None]
        # Prompts enter together: a forward for few of them costs as much as for many.
        if len(idle) >= max(1, len(self._numbers) // 8) or len(idle) == len(self._numbers):
            if continued := {row: following for row in idle if (following := self._next[row])}:
                self._continue(continued)
                return
            if self._waiting:
                self._enter(idle)
                return
        longest = max((self._held[row] for row, number in enumerate(self._numbers) if number is not None), default=0)
        window = -(-(longest + self._steps_a_turn) // self._window_unit) * self._window_unit
        for _ in range(self._steps_a_turn):
            self._cache.decode(window)
            if self._graphs is None:
                self._step()
            else:
                self._graphs.run(window, self._step)
        self._collect()

    def _enter(self, free: Sequence[int]) -> None:
        """Compute prompts up to their last token, once where several rows continue the same one.

        The last token is the first that the row decodes.
        """
        taken: list[int] = []
        sources: dict[tuple[tuple[int, ...], int], int] = {}
        width = 1
        while self._waiting and len(taken) < len(free):
            source = self._source(self._waiting[0])
            wider, more = max(width, len(source[0]) - 1), len(sources) + (source not in sources)
            if taken and wider * more > _PREFILL_TOKENS:
                break
            width = wider
            sources.setdefault(source, len(sources))
            taken.append(self._waiting.popleft())
        rows = free[: len(taken)]
        tokens = torch.zeros(len(sources), width, dtype=torch.int64)
        for (prompt, _), place in sources.items():
            # What follows a prompt is padding: nothing before it attends to it, and new tokens replace it.
            tokens[place, : len(prompt) - 1] = torch.tensor(prompt[:-1], dtype=torch.int64)
        source_k = [sources[self._source(number)] for number in taken]
        longest_r = [longest for _, longest in sources]
        self._cache.fill(*(torch.tensor(each, device=self._device) for each in (rows, source_k, longest_r)))
        self._model(tokens.to(self._device), cache=self._cache, last_only=True)
        self._begin(rows, taken)

    def _source(self, number: int) -> tuple[tuple[int, ...], int]:
        """What a request's keys and values are computed from: its prompt, and how long its text may become."""
        request = self._requests[number]
        longest = len(request.prompt) + request.max_new_tokens
        return tuple(request.prompt), longest if self._follow_up is None else self._follow_up.most_tokens

    def _continue(self, following: Mapping[int, tuple[int, int]]) -> None:
        """Compute what the next prompts of rows have beyond the tokens that the rows hold already."""
        new: dict[int, Sequence[int]] = {}
        for row, (number, kept) in following.items():
            added = self._requests[number].prompt[kept:-1]
            if new and max(len(added), *map(len, new.values())) * (len(new) + 1) > _EXTENDED_TOKENS:
                break
            new[row] = added
            self._next[row] = None
        rows_k = torch.tensor(list(new), device=self._device)
        self._cache.lengths_b[rows_k] = torch.tensor([following[row][1] for row in new], device=self._device)
        longest = max(following[row][1] + len(added) for row, added in new.items())
        self._cache.extend(rows_k, longest, -(-(longest + 1) // self._window_unit) * self._window_unit)
        tokens = torch.zeros(len(new), max(1, *map(len, new.values())), dtype=torch.int64)
        for place, added in enumerate(new.values()):
            tokens[place, : len(added)] = torch.tensor(added, dtype=torch.int64)
        self._model(tokens.to(self._device), cache=self._cache, last_only=True)
        self._begin(list(new), [following[row][0] for row in new])

    def _begin(self, rows: Sequence[int], taken: Sequence[int]) -> None:
        """Let rows that hold a prompt but for its last token decode from that one on."""
        asked = [self._requests[number] for number in taken]
        rows_k = torch.tensor(rows, device=self._device)
        for state, values in (
            (self._cache.lengths_b, [len(request.prompt) - 1 for request in asked]),
            (self._rows.tokens_b, [request.prompt[-1] for request in asked]),
            (self._rows.most_b, [request.max_new_tokens for request in asked]),
            (self._rows.written_b, [0] * len(asked)),
        ):
            state[rows_k] = torch.tensor(values, device=self._device)
        self._rows.running_b[rows_k] = self._rows.most_b[rows_k] > 0
        if self._sampler.draws:
            drawn_kt = torch.stack([request.draws(self._most) for request in asked])
            self._rows.draws_bt[rows_k, : self._most] = drawn_kt.to(self._device)
        for row, number in zip(rows, taken, strict=True):
            self._numbers[row], self._held[row] = number, len(self._requests[number].prompt) - 1

    def _step(self) -> None:
        """One token for each row; rows that have ended stay as they are."""
        logits_bv = self._model(self._rows.tokens_b[:, None], cache=self._cache, last_only=True)[:, -1]
        place_b1 = torch.where(self._rows.running_b, self._rows.written_b, self._most)[:, None]
        chosen_b, chance_b = self._sampler.choose(logits_bv, self._rows.draws_bt.gather(1, place_b1)[:, 0])
        self._rows.output_bt.scatter_(1, place_b1, chosen_b[:, None])
        if chance_b is not None:
            self._rows.chance_bt.scatter_(1, place_b1, chance_b[:, None])
        self._rows.tokens_b.copy_(torch.where(self._rows.running_b, chosen_b, self._rows.tokens_b))
        self._rows.written_b.add_(self._rows.running_b)
        self._cache.lengths_b.add_(self._rows.running_b)
        stopped_b = (chosen_b[:, None] == self._stops).any(dim=1) | (self._rows.written_b >= self._rows.most_b)
        self._rows.running_b.logical_and_(~stopped_b)

    def _collect(self) -> None:
        """Take what has ended off its row."""
        running, written = torch.stack([self._rows.running_b.long(), self._rows.written_b]).tolist()
        ended = [row for row, number in enumerate(self._numbers) if number is not None and not running[row]]
        for row, number in enumerate(self._numbers):
            if number is not None:
                self._held[row] = len(self._requests[number].prompt) - 1 + written[row]
        if not ended:
            return
        rows_k = torch.tensor(ended, device=self._device)
        output, chance = self._rows.output_bt[rows_k].tolist(), self._rows.chance_bt[rows_k].tolist()
        stops = set(self._stops.tolist())
        for row, tokens, chances in zip(ended, output, chance, strict=True):
            number = self._numbers[row]
            assert number is not None
            kept = tokens[: written[row]]
            chances = chances[: written[row]] if self._sampler.draws else []
            self._results[number] = result = Generated(kept, chances, bool(kept) and kept[-1] in stops)
            self._numbers[row] = None
            if self._follow_up is not None and (request := self._follow_up.ask(number, result)):
                held = [*self._requests[number].prompt, *kept][: self._held[row]]
                self._next[row] = len(self._requests), shared_length(request.prompt[:-1], held)
                self._requests.append(request)
                self._results.append(None)
        self.ended += len(ended)
        if not self._waiting and self._graphs is None:
            self._shrink()

    def _shrink(self) -> None:
        """Drop rows that nothing takes any more, once they are half of all: without a GPU they cost as much as others.

        CUDA graphs would have to be made again, which takes longer than these rows do.
        """
        kept = [row for row, number in enumerate(self._numbers) if number is not None or self._next[row] is not None]
        if 0 < len(kept) <= len(self._numbers) // 2:
            rows_k = torch.tensor(kept, device=self._device)
            self._cache.keep(rows_k)
            self._rows = self._rows.kept(rows_k)
            self._numbers, self._held = [self._numbers[row] for row in kept], [self._held[row] for row in kept]
            self._next = [self._next[row] for row in kept]


class _Graphs:
    """A step as CUDA graphs, one for each window: launching its kernels one by one takes longer than they run."""

    def __init__(self) -> None:
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._refused = False

    def run(self, window: int, step: Callable[[], None]) -> None:
        """Do one step: the first of a window kernel by kernel, so that all are compiled, the others by its graph."""
        if window in self._graphs:
            self._graphs[window].replay()
            return
        step()
        if not self._refused:
            self._capture(window, step)

    def _capture(self, window: int, step: Callable[[], None]) -> None:
        graph = torch.cuda.CUDAGraph()
        pool = next((other.pool() for other in self._graphs.values()), None)
        try:
            # Other threads, which save checkpoints, may use the GPU meanwhile.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                step()
        except RuntimeError as error:
            self._refused = True
            print(f"note: decoding without CUDA graphs, which is slower: {error}", file=sys.stderr, flush=True)
        else:
            self._graphs[window] = graph
