"""An adapter that lets lm-evaluation-harness run its tasks on our checkpoints (the extra `lm-eval`).

Only importing this module needs the harness; nothing else in keepstep does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from torch import Tensor

from keepstep.evaluate.batch import OpenDecoder, by_length, generate_batch

Logits = Callable[[Tensor], Tensor]
"""Tokens [b, t] in, logits [b, t, v] out."""


class KeepstepLM(LM):  # type: ignore[misc]
    """Scores and continues texts with a forward callable; knows nothing of runs or parallelism."""

    def __init__(
        self,
        logits: Logits,
        open_decoder: OpenDecoder,
        tokenizer: Any,
        *,
        ends: frozenset[int],
        room: int,
        batch: int = 16,
    ) -> None:
        super().__init__()
        self._logits, self._open_decoder, self._tokenizer = logits, open_decoder, tokenizer
        self._ends, self._room, self._batch = ends, room, batch

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:  # noqa: ARG002
        """Log-probability of each continuation after its context, and whether greedy decoding would give it."""
        rows = []
        for request in requests:
            context, continuation = _without_last_spaces(*request.args)
            if not context:
                rows.append(([self._first(), *self._encode(continuation)], 1))
                continue
            # Encoded together: what the context's own tokens cover is the context, even where a token reaches across.
            whole = self._encode(context + continuation)
            rows.append((whole, max(1, min(len(self._encode(context)), len(whole) - 1))))
        return self._score(rows)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:  # noqa: ARG002
        """Log-probability of each text, in windows of the model's length; every token is predicted once."""
        totals = []
        for request in requests:
            ids = [self._first(), *self._encode(request.args[0])]
            total = 0.0
            for start in range(0, len(ids) - 1, self._room - 1):
                total += self._score([(ids[start : start + self._room], 1)])[0][0]
            totals.append(total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:  # noqa: ARG002
        """Greedy continuations up to a stop text."""
        answers = [""] * len(requests)
        by_most: dict[int, list[int]] = {}
        for place, request in enumerate(requests):
            # At least one token of the prompt stays, however long the answer may be.
            most = min(int(request.args[1].get("max_gen_toks", 256)), self._room - 1)
            by_most.setdefault(most, []).append(place)
        for most, chosen in by_most.items():
            prompts = [self._prompt(requests[place].args[0], self._room - most) for place in chosen]
            for group in by_length(prompts, self._batch):
                encoded = [prompts[number] for number in group]
                made = generate_batch(self._open_decoder, encoded, max_new_tokens=most, ends=self._ends)
                for number, ids in zip(group, made, strict=True):
                    until = requests[chosen[number]].args[1].get("until") or []
                    stops = [until] if isinstance(until, str) else until
                    answers[chosen[number]] = _cut(self._tokenizer.decode(ids), stops)
        return answers

    def _prompt(self, text: str, room: int) -> list[int]:
        return self._encode(text)[-room:] or [self._first()]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _first(self) -> int:
        return min(self._ends) if self._ends else 0

    @torch.no_grad()
    def _score(self, rows: Sequence[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        """For each (tokens, start): the summed log-probability from `start` on, and whether all are the likeliest."""
        results = [(0.0, True)] * len(rows)
        cut = [(ids[-self._room :], max(1, start - max(0, len(ids) - self._room))) for ids, start in rows]
        for places in by_length([ids for ids, _ in cut], self._batch):
            width = max(len(cut[place][0]) for place in places)
            tokens_bt = torch.tensor([cut[place][0] + [0] * (width - len(cut[place][0])) for place in places])
            log_bt = torch.log_softmax(self._logits(tokens_bt).float(), dim=-1)
            for row, place in enumerate(places):
                ids, start = cut[place]
                wanted = torch.tensor(ids[start:], device=log_bt.device)
                predicted = log_bt[row, start - 1 : len(ids) - 1]
                picked = predicted.gather(1, wanted[:, None]).sum()
                results[place] = (float(picked), bool((predicted.argmax(-1) == wanted).all()))
        return results


def _without_last_spaces(context: str, continuation: str) -> tuple[str, str]:
    """Spaces at the context's end belong to what follows, as in the harness's own models: most tokens begin with one.

    Else the token that holds both would count as the context's, and its probability would be left out.
    """
    kept = context.rstrip()
    return kept, context[len(kept) :] + continuation


def _cut(text: str, stops: Sequence[str]) -> str:
    places = [text.find(stop) for stop in stops if stop and stop in text]
    return text[: min(places)] if places else text
