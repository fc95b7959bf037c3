"""A chat model: weights, tokenizer and chat template together, for evaluation and conversation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keepstep.config.schema import RunConfig
from keepstep.core.errors import DataError, UsageError
from keepstep.data import tokenization
from keepstep.data.chat.rows import BadRow
from keepstep.data.chat.template import ChatTemplate, find_template
from keepstep.data.chat.tokenizer import end_tokens
from keepstep.evaluate.generate import Decoder, Forward, batches_by_length, chooser, generate_batch, stream
from keepstep.interop.full_model import load_full_model, load_initial_model, open_device
from keepstep.interop.run_source import find_chat_template, find_tokenizer
from keepstep.models.attention_context import KeyValueCache
from keepstep.models.transformer import Transformer


def is_valid_text(text: str) -> bool:
    """Whether a text has no lone surrogate, which JSON can write and Python uses for invalid UTF-8."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Temperature 0 takes the likeliest token each time."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    max_new_tokens: int = 256


@dataclass(frozen=True)
class Prompt:
    """Messages to answer, and the tools that the answer may call."""

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] = ()


@dataclass(frozen=True)
class ChatModel:
    """A model that answers prompts."""

    model: Transformer
    config: RunConfig
    step: int
    tokenizer: Any
    tokenizer_path: Path
    template: ChatTemplate
    stop_tokens: frozenset[int]
    """Tokens that end an answer."""

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and answer together."""
        return max(self.config.model.max_positions, self.config.model.seq_len)

    def encode(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt, up to the start of the answer."""
        try:
            text = self.template.prompt(prompt.messages, prompt.tools)
        except BadRow as bad:
            raise DataError(str(bad), "leave out what it refuses, for example a system message or tools") from None
        if not is_valid_text(text):
            raise DataError("the messages contain a lone surrogate or invalid UTF-8", "write them as UTF-8")
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def answers(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        batch: int,
        progress: Callable[[int], None] = lambda _: None,
    ) -> list[str]:
        """One answer for each prompt, computed in batches."""
        encoded = [self.encode(prompt) for prompt in prompts]
        # Checked first: the longest prompts come last, and must not cost hours of answers.
        for number, ids in enumerate(encoded, start=1):
            if len(ids) >= self.context_length:
                raise DataError(
                    f"question {number} has {len(ids)} tokens, which fill the model's limit of {self.context_length}",
                    "leave such questions out, or use a model with a longer context",
                )
        answers = [""] * len(prompts)
        done = 0
        for places in batches_by_length(encoded, batch):
            for place, ids in zip(places, self._batch([encoded[place] for place in places], sampling), strict=True):
                answers[place] = self.decode(ids)
            done += len(places)
            progress(done)
        return answers

    def decode(self, ids: list[int]) -> str:
        """Text of tokens, with special ones, because calls are written with them."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def stream(self, prompt: Prompt, sampling: Sampling) -> Iterator[str]:
        """An answer piece by piece, as it is written."""
        ids = self.encode(prompt)
        room = self.context_length - len(ids)
        if room < 1:
            raise UsageError(
                f"the conversation has {len(ids)} tokens, the model's limit is {self.context_length}",
                "start a new conversation",
            )
        most = min(room, sampling.max_new_tokens)
        # Not for the full context: at 128k tokens the cache would be larger than the weights.
        forward = cached_forward(self.model, len(ids) + most)
        choose = chooser(sampling.temperature, sampling.top_p, sampling.seed)
        written: list[int] = []
        shown = ""
        for token in stream(forward, ids, choose, max_new_tokens=most):
            if token in self.stop_tokens:
                break
            written.append(token)
            text = self.decode(written)
            # A character of several tokens is shown when it is complete.
            if not text.endswith("\ufffd"):
                yield text[len(shown) :]
                shown = text
        yield self.decode(written)[len(shown) :]

    def open_decoder(self, padding_b: Tensor, capacity: int) -> Decoder:
        """A forward over its own key-value cache."""
        return open_decoder(self.model, padding_b, capacity)

    def _batch(self, encoded: list[list[int]], sampling: Sampling) -> list[list[int]]:
        shared = min(self.context_length - max(map(len, encoded)), sampling.max_new_tokens)
        answers = self._generate(encoded, shared, sampling, sampling.seed)
        for row, ids in enumerate(encoded):
            own = min(self.context_length - len(ids), sampling.max_new_tokens)
            if len(answers[row]) == shared < own:
                # The longest prompt of the batch left this row less room than it has alone.
                (answers[row],) = self._generate([ids], own, sampling, sampling.seed + row)
        return answers

    def _generate(self, encoded: list[list[int]], most: int, sampling: Sampling, seed: int) -> list[list[int]]:
        return generate_batch(
            self.open_decoder,
            encoded,
            max_new_tokens=most,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=seed,
            stop_tokens=self.stop_tokens,
        )


def open_decoder(model: Transformer, padding_b: Tensor, capacity: int) -> Decoder:
    """A forward over its own key-value cache, for rows with this much padding on the left."""
    device = next(model.parameters()).device
    # Without padding no mask is needed, so the fast kernels can be used.
    cache = KeyValueCache(model.config.layers, capacity, padding_b.to(device) if bool(padding_b.any()) else None)

    def decode(tokens_bt: Tensor) -> Tensor:
        logits: Tensor = model(tokens_bt.to(device), cache=cache, last_only=True)[:, -1]
        return logits

    return decode


def cached_forward(model: Transformer, capacity: int) -> Forward:
    """A forward for `generate`: all tokens so far in, logits of the last one out, with a key-value cache."""
    decode = open_decoder(model, torch.zeros(1, dtype=torch.int64), capacity)
    seen = 0

    def forward(tokens: Tensor) -> Tensor:
        nonlocal seen
        new, seen = tokens[:, seen:], tokens.shape[1]
        return decode(new)[0]

    return forward


def open_chat_model(
    where: Path, device: str = "auto", tokenizer: Path | None = None, *, start: bool = False, only: str = ""
) -> ChatModel:
    """Load a run's folder or a Hugging Face folder; with `start`, the weights that the run started from.

    `only` names one step of a run by the hash of its manifest.
    """
    chosen = open_device(device)
    model, config, step = load_initial_model(where) if start else load_full_model(where, only=only)
    path = tokenizer or find_tokenizer(where)
    if path is None:
        raise DataError(f"{where} has no tokenizer.json", "name one with --tokenizer")
    loaded = tokenization.load(path)
    template = find_template(path, find_chat_template(where, config))
    return ChatModel(
        model=model.to(chosen),
        config=config,
        step=step,
        tokenizer=loaded,
        tokenizer_path=path,
        template=template,
        stop_tokens=end_tokens(path, loaded, template),
    )
