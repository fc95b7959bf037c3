"""Continuous batching: one thread decodes all answers together, and an answer joins or leaves between two tokens.

A prompt is computed alone, over a key-value cache of its own, from where it differs from those before it. Its row then
joins the common cache, which is rebuilt whenever rows join or leave. The tokens of an answer do not depend on the other
rows, up to rounding.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Literal

import torch
from torch import Tensor

from keepstep.evaluate.kept_prompts import KeptPrompts
from keepstep.models.attention_context import KeyValueCache
from keepstep.models.transformer import Transformer

End = Literal["stop", "length", "cancelled", "failed"]
"""Why an answer ended."""

_HEADROOM = 64
"""Tokens for which the common cache has room before it is rebuilt."""


class BusyError(Exception):
    """Too many answers are waiting already."""


@dataclass(eq=False)
class Generation:
    """An answer that is asked for. `choose` picks a token from logits [v]; None ends the answer."""

    prompt: Sequence[int]
    choose: Callable[[Tensor], int | None]
    max_new_tokens: int
    cancelled: threading.Event = field(default_factory=threading.Event)
    """Set by whoever does not want the rest."""
    error: str = ""
    reused: int = 0
    """Tokens of the prompt whose keys and values were there already."""
    _written: int = 0
    _output: SimpleQueue[int | End] = field(default_factory=SimpleQueue)

    def tokens(self, poll_s: float, on_poll: Callable[[], None]) -> Iterator[int | End]:
        """The tokens as they come, then the reason of the end; `on_poll` is called every `poll_s`."""
        polled = time.monotonic()
        item: int | End | None = None
        while not isinstance(item, str):
            try:
                item = self._output.get(timeout=poll_s)
                yield item
            except Empty:
                pass
            if time.monotonic() - polled >= poll_s:
                polled = time.monotonic()
                on_poll()

    def _take(self, logits_v: Tensor) -> int | None:
        """Choose the next token and hand it over; None if the answer has ended."""
        token = None if self.cancelled.is_set() else self.choose(logits_v)
        if token is None:
            self._end("cancelled" if self.cancelled.is_set() else "stop")
            return None
        self._output.put(token)
        self._written += 1
        if self._written < self.max_new_tokens:
            return token
        self._end("length")
        return None

    def _end(self, reason: End) -> None:
        self._output.put(reason)


class Batcher:
    """Decodes up to `most_rows` answers at a time; up to `most_waiting` more wait for their turn."""

    def __init__(self, model: Transformer, most_rows: int, most_waiting: int = 256) -> None:
        self._model = model
        self._device = next(model.parameters()).device
        self._most_rows, self._most_waiting = most_rows, most_waiting
        self._waiting: deque[Generation] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._rows: list[Generation] = []
        self._next_tokens: list[int] = []
        self._cache: KeyValueCache | None = None
        self._prompts = KeptPrompts(model)
        self.tokens_written = self.tokens_reused = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """Answers being decoded."""
        return len(self._rows)

    @property
    def waiting(self) -> int:
        """Answers that wait for their turn."""
        return len(self._waiting)

    def submit(self, generation: Generation) -> None:
        """Ask for an answer. Raises BusyError."""
        with self._changed:
            if len(self._waiting) >= self._most_waiting or self._closed:
                raise BusyError
            self._waiting.append(generation)
            self._changed.notify()

    def close(self) -> None:
        """End all answers, and the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    @torch.no_grad()
    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waiting or self._rows)
                if self._closed:
                    break
                # One prompt between two tokens: a crowd of new prompts does not hold up those being answered.
                joining = self._waiting.popleft() if self._waiting and len(self._rows) < self._most_rows else None
            if joining is not None:
                self._guarded([joining], functools.partial(self._join, joining))
            if self._rows:
                self._guarded(list(self._rows), self._decode)
        for generation in (*self._rows, *self._waiting):
            generation._end("cancelled")

    def _guarded(self, concerned: Sequence[Generation], work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # out of memory, for example: it must not end the server
            self._prompts.clear()
            for generation in concerned:
                generation.error = f"{type(error).__name__}: {error}"
                generation._end("failed")
            if concerned == self._rows:
                self._rows, self._next_tokens, self._cache = [], [], None

    def _join(self, generation: Generation) -> None:
        if generation.cancelled.is_set():
            generation._end("cancelled")
            return
        prompt = generation.prompt
        cache = self._prompts.begin(prompt, len(prompt), len(prompt) + generation.max_new_tokens)
        generation.reused = cache.length
        logits_v = self._logits(torch.tensor([prompt[cache.length :]]), cache)[0]
        self._prompts.keep(prompt, cache)
        token = generation._take(logits_v)
        self.tokens_reused += generation.reused
        self.tokens_written += 1
        if token is not None:
            self._keep(range(len(self._rows)), [(generation, token, cache)])

    def _decode(self) -> None:
        assert self._cache is not None
        if self._cache.length == self._cache.capacity:
            self._keep(range(len(self._rows)), [])
        logits_bv = self._logits(torch.tensor(self._next_tokens)[:, None], self._cache)
        chosen = [row._take(logits_v) for row, logits_v in zip(self._rows, logits_bv, strict=True)]
        self.tokens_written += len(chosen)
        self._next_tokens = [0 if token is None else token for token in chosen]
        if None in chosen:
            self._keep([place for place, token in enumerate(chosen) if token is not None], [])

    def _logits(self, tokens_bt: Tensor, cache: KeyValueCache) -> Tensor:
        logits_bv: Tensor = self._model(tokens_bt.to(self._device), cache=cache, last_only=True)[:, -1]
        return logits_bv.float().cpu()

    def _keep(self, places: Sequence[int], added: Sequence[tuple[Generation, int, KeyValueCache]]) -> None:
        """Rebuild the common cache from these rows and the added ones."""
        kept = [(self._cache, place) for place in places] if self._cache is not None else []
        rows = [*kept, *((cache, 0) for _, _, cache in added)]
        capacity = max((cache.length for cache, _ in rows), default=0) + _HEADROOM
        # Built before anything changes: without memory for it, those being answered continue as they were.
        self._cache = KeyValueCache.gathered(rows, capacity) if rows else None
        self._rows = [*(self._rows[place] for place in places), *(row for row, _, _ in added)]
        self._next_tokens = [*(self._next_tokens[place] for place in places), *(token for _, token, _ in added)]
