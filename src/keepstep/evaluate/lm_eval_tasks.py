"""`keepstep eval lm`: tasks of lm-evaluation-harness on a run or a Hugging Face folder (the extra `lm-eval`).

Importing this module needs the harness; nothing else in keepstep does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from keepstep.core.errors import UsageError
from keepstep.evaluate.chat_model import ChatModel, Sampling
from keepstep.evaluate.continuous_batching import Request
from keepstep.evaluate.generate import batches_by_length

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
except ImportError:
    raise UsageError("lm-evaluation-harness is not installed", "pip install 'keepstep[lm-eval]'") from None

Logits = Callable[[Tensor], Tensor]
"""Tokens [b, t] in, logits [b, t, v] out."""
Continue = Callable[[Sequence[Request]], list[list[int]]]
"""Requests in, the new tokens of each out."""


class KeepstepLM(LM):  # type: ignore[misc]
    """lm-evaluation-harness's interface over a forward callable; knows nothing of runs or parallelism."""

    def __init__(
        self,
        logits: Logits,
        continued: Continue,
        tokenizer: Any,
        *,
        stop_tokens: frozenset[int],
        context_length: int,
        batch: int = 16,
    ) -> None:
        super().__init__()
        self._logits, self._continued, self._tokenizer = logits, continued, tokenizer
        self._stop_tokens, self._context_length, self._batch = stop_tokens, context_length, batch

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:  # noqa: ARG002
        """Log-probability of each continuation after its context, and whether greedy decoding would give it."""
        rows = []
        for request in requests:
            context, continuation = _move_spaces(*request.args)
            if not context:
                rows.append(([self._first(), *self._encode(continuation)], 1))
                continue
            # Encoded together. The context has as many tokens as on its own, even if a token crosses its end.
            whole = self._encode(context + continuation)
            rows.append((whole, max(1, min(len(self._encode(context)), len(whole) - 1))))
        return self._score(rows)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:  # noqa: ARG002
        """Log-probability of each text, in windows of the context length; every token is predicted once."""
        totals = []
        for request in requests:
            ids = [self._first(), *self._encode(request.args[0])]
            total = 0.0
            for start in range(0, len(ids) - 1, self._context_length - 1):
                total += self._score([(ids[start : start + self._context_length], 1)])[0][0]
            totals.append(total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:  # noqa: ARG002
        """Greedy continuations up to a stop text."""
        asked = []
        for request in requests:
            # At least one token of the prompt is kept, however long the answer may be.
            most = min(int(request.args[1].get("max_gen_toks", 256)), self._context_length - 1)
            prompt = self._encode(request.args[0])[most - self._context_length :] or [self._first()]
            asked.append(Request(prompt, most))
        answers = []
        for request, ids in zip(requests, self._continued(asked), strict=True):
            until = request.args[1].get("until") or []
            stops = [until] if isinstance(until, str) else until
            answers.append(_until_stop(self._tokenizer.decode(ids), stops))
        return answers

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _first(self) -> int:
        return min(self._stop_tokens) if self._stop_tokens else 0

    @torch.no_grad()
    def _score(self, rows: Sequence[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        """For each (tokens, start): the summed log-probability from `start` on, and whether greedy decoding agrees."""
        results = [(0.0, True)] * len(rows)
        windows = [
            (ids[-self._context_length :], max(1, start - max(0, len(ids) - self._context_length)))
            for ids, start in rows
        ]
        for places in batches_by_length([ids for ids, _ in windows], self._batch):
            width = max(len(windows[place][0]) for place in places)
            tokens_bt = torch.tensor([windows[place][0] + [0] * (width - len(windows[place][0])) for place in places])
            log_bt = torch.log_softmax(self._logits(tokens_bt).float(), dim=-1)
            for row, place in enumerate(places):
                ids, start = windows[place]
                wanted = torch.tensor(ids[start:], device=log_bt.device)
                predicted = log_bt[row, start - 1 : len(ids) - 1]
                picked = predicted.gather(1, wanted[:, None]).sum()
                results[place] = (float(picked), bool((predicted.argmax(-1) == wanted).all()))
        return results


def _move_spaces(context: str, continuation: str) -> tuple[str, str]:
    """Move spaces at the end of the context to the continuation, as the harness's own models do.

    Most tokens start with a space. Otherwise, the token with the space and the first word would count as context, and
    its probability would be left out.
    """
    kept = context.rstrip()
    return kept, context[len(kept) :] + continuation


def _until_stop(text: str, stops: Sequence[str]) -> str:
    places = [text.find(stop) for stop in stops if stop and stop in text]
    return text[: min(places)] if places else text


@torch.no_grad()
def run_tasks(model: ChatModel, tasks: list[str], batch: int, limit: int = 0) -> dict[str, dict[str, float]]:
    """The metrics of each task, by the harness's names."""
    if not tasks:
        raise UsageError("no task was named", "--tasks hellaswag,arc_easy")
    from lm_eval import simple_evaluate

    device = next(model.model.parameters()).device

    def logits(tokens_bt: Tensor) -> Tensor:
        found: Tensor = model.model(tokens_bt.to(device))[..., : model.config.model.vocab]
        return found

    adapter = KeepstepLM(
        logits,
        lambda requests: model.continued(requests, Sampling(), batch),
        model.tokenizer,
        stop_tokens=model.stop_tokens,
        context_length=model.context_length,
        batch=batch,
    )
    found = simple_evaluate(model=adapter, tasks=tasks, limit=limit or None, bootstrap_iters=0)
    results: dict[str, dict[str, Any]] = found["results"]
    return {
        task: {name.split(",")[0]: float(value) for name, value in numbers.items() if isinstance(value, int | float)}
        for task, numbers in results.items()
    }
