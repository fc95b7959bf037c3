"""A model that answers: weights, tokenizer and chat template together, for evaluation and conversation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keepstep.config.schema import RunConfig
from keepstep.core.errors import DataError, UsageError
from keepstep.data import tokenize
from keepstep.data.chat_rows import BadRow
from keepstep.data.chat_template import TURN_END, ChatTemplate, find_template
from keepstep.data.tokenize import END_OF_TEXT
from keepstep.evaluate.batch import Decoder, by_length, generate_batch
from keepstep.evaluate.generate import chooser, stream
from keepstep.models.cache import KeyValueCache
from keepstep.models.transformer import Transformer
from keepstep.train.start import find_chat_template, find_tokenizer, open_device, start_model, whole_model


def is_whole_text(text: str) -> bool:
    """Whether it holds no half of a surrogate pair, which JSON can write and bytes that are no UTF-8 are read as."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Temperature 0 takes the likeliest each time."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    max_new_tokens: int = 256


@dataclass(frozen=True)
class Prompt:
    """Messages that want an answer, and the tools it may call."""

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] = ()


@dataclass(frozen=True)
class Speaker:
    """Answers prompts. `ends` are the tokens that end an answer."""

    model: Transformer
    config: RunConfig
    step: int
    tokenizer: Any
    tokenizer_path: Path
    template: ChatTemplate
    ends: frozenset[int]

    @property
    def room(self) -> int:
        """Tokens that prompt and answer may have together."""
        return max(self.config.model.max_positions, self.config.model.seq_len)

    def encode(self, prompt: Prompt) -> list[int]:
        """The tokens that an answer follows."""
        try:
            text = self.template.prompt(prompt.messages, prompt.tools)
        except BadRow as bad:
            raise DataError(str(bad), "leave out what it refuses: a system message or tools, perhaps") from None
        if not is_whole_text(text):
            raise DataError("the messages hold half of a character, or bytes that are no UTF-8", "write them as UTF-8")
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def answers(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        batch: int,
        progress: Callable[[int], None] = lambda _: None,
    ) -> list[str]:
        """One answer for each prompt, many at a time."""
        encoded = [self.encode(prompt) for prompt in prompts]
        # First, because the longest come last: hours of answers must not be lost to them.
        for number, ids in enumerate(encoded, start=1):
            if len(ids) >= self.room:
                raise DataError(
                    f"question {number} has {len(ids)} tokens, which fill the model's limit of {self.room}",
                    "leave such questions out, or ask a model with longer rows",
                )
        answers = [""] * len(prompts)
        done = 0
        for places in by_length(encoded, batch):
            for place, ids in zip(places, self._batch([encoded[place] for place in places], sampling), strict=True):
                answers[place] = self.decode(ids)
            done += len(places)
            progress(done)
        return answers

    def decode(self, ids: list[int]) -> str:
        """Text of tokens; special ones are kept, because calls are written with them."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def stream(self, prompt: Prompt, sampling: Sampling) -> Iterator[str]:
        """An answer piece by piece, as it is written."""
        ids = self.encode(prompt)
        room = self.room - len(ids)
        if room < 1:
            raise UsageError(
                f"the conversation has {len(ids)} tokens, the model's limit is {self.room}", "start afresh"
            )
        most = min(room, sampling.max_new_tokens)
        # Not for all the model has room for: at 128k tokens that is more than the weights.
        decode = self.open_decoder(torch.zeros(1, dtype=torch.int64), len(ids) + most)
        seen = 0

        def forward(tokens: Tensor) -> Tensor:
            nonlocal seen
            new, seen = tokens[:, seen:], tokens.shape[1]
            return decode(new)[0]

        choose = chooser(sampling.temperature, sampling.top_p, sampling.seed)
        written: list[int] = []
        shown = ""
        for token in stream(forward, ids, choose, max_new_tokens=most):
            if token in self.ends:
                break
            written.append(token)
            text = self.decode(written)
            # A character of several tokens shows once it is whole.
            if not text.endswith("\ufffd"):
                yield text[len(shown) :]
                shown = text
        yield self.decode(written)[len(shown) :]

    def open_decoder(self, padding_b: Tensor, capacity: int) -> Decoder:
        """A forward over a key-value cache of its own."""
        device = next(self.model.parameters()).device
        # Without padding no mask is needed, and the fast kernels stay.
        padding = padding_b.to(device) if bool(padding_b.any()) else None
        cache = KeyValueCache(self.config.model.layers, capacity, padding)

        def decode(tokens_bt: Tensor) -> Tensor:
            logits: Tensor = self.model(tokens_bt.to(device), cache=cache, last_only=True)[:, -1]
            return logits

        return decode

    def _batch(self, encoded: list[list[int]], sampling: Sampling) -> list[list[int]]:
        shared = min(self.room - max(map(len, encoded)), sampling.max_new_tokens)
        answers = self._generate(encoded, shared, sampling, sampling.seed)
        for row, ids in enumerate(encoded):
            own = min(self.room - len(ids), sampling.max_new_tokens)
            if len(answers[row]) == shared < own:
                # The longest prompt of the batch left it less room than it has alone.
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
            ends=self.ends,
        )


def open_speaker(where: Path, device: str = "auto", tokenizer: Path | None = None, *, start: bool = False) -> Speaker:
    """A run's folder or a Hugging Face folder, ready to answer; with `start` the weights the run began with."""
    chosen = open_device(device)
    model, config, step = start_model(where) if start else whole_model(where)
    path = tokenizer or find_tokenizer(where)
    if path is None:
        raise DataError(f"{where} has no tokenizer.json", "name one with --tokenizer")
    loaded = tokenize.load(path)
    template = find_template(path, find_chat_template(where, config))
    return Speaker(
        model=model.to(chosen),
        config=config,
        step=step,
        tokenizer=loaded,
        tokenizer_path=path,
        template=template,
        ends=end_tokens(path, loaded, template),
    )


def end_tokens(path: Path, tokenizer: Any, template: ChatTemplate) -> frozenset[int]:
    """Tokens that end an answer: those the folder's files name, the one that the template ends a turn with, and the
    usual ones where the tokenizer has them."""
    ids: set[int] = set()
    for name in ("generation_config.json", "tokenizer_config.json"):
        file = path.parent / name
        if file.is_file():
            config = json.loads(file.read_text(encoding="utf-8"))
            listed = config.get("eos_token_id")
            ids.update(listed if isinstance(listed, list) else [] if listed is None else [listed])
            text = config.get("eos_token")
            named = tokenizer.token_to_id(text.get("content") if isinstance(text, dict) else text) if text else None
            ids.update([] if named is None else [named])
    # A base model's files know the end of a text only; what it has been taught to end a turn with is the template's.
    known = (tokenizer.token_to_id(text) for text in (template.turn_end(), TURN_END, END_OF_TEXT) if text)
    return frozenset(ids | {number for number in known if number is not None})
