"""A chat model: weights, tokenizer and chat template together, for evaluation and conversation."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
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
from keepstep.evaluate.continuous_batching import FollowUp, Generated, Request, generate_batch
from keepstep.evaluate.draw import Sampler
from keepstep.evaluate.generate import Forward, batches_by_length, chooser, stream
from keepstep.evaluate.kept_prompts import KeptPrompts
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


Reply = Callable[[int, str | None], Prompt | None]
"""From the number of a conversation and an answer to its next prompt, or None at its end. An answer that is None says
that the prompt left no room for one."""


@dataclass(frozen=True)
class ChatModel:
    """A model that answers prompts."""

    model: Transformer
    config: RunConfig
    step: int
    tokenizer: Any
    template: ChatTemplate
    stop_tokens: frozenset[int]
    """Tokens that end an answer."""

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and answer together."""
        return max(self.config.model.max_positions, self.config.model.seq_len)

    def identity(self) -> dict[str, Any]:
        """What answers depend on: some values of every tensor, which one training step changes, and the template."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.model.named_parameters()):
            values = tensor.detach().flatten()
            sample = values[:: max(1, values.numel() // 64)].double().cpu().numpy()
            digest.update(f"{name} {tuple(tensor.shape)}".encode() + sample.tobytes())
        template = hashlib.sha256(self.template.source.encode()).hexdigest()
        return {"weights": digest.hexdigest()[:16], "template": template[:16]}

    def encode(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt, up to the start of the answer."""
        try:
            text = self.template.prompt(prompt.messages, prompt.tools)
        except BadRow as bad:
            raise DataError(str(bad), "leave out what it refuses, for example a system message or tools") from None
        if not is_valid_text(text):
            raise DataError("the messages contain a lone surrogate or invalid UTF-8", "write them as UTF-8")
        _check_shown(prompt, text)
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def answers(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        batch: int,
        progress: Callable[[int], None] = lambda _: None,
    ) -> list[str]:
        """One answer for each prompt, at most `batch` of them at a time."""
        # A prompt that is answered several times is encoded once.
        different = {id(prompt): prompt for prompt in prompts}
        ids_of = {key: self.encode(prompt) for key, prompt in different.items()}
        encoded = [ids_of[id(prompt)] for prompt in prompts]
        # Checked first: the longest prompts come last, and must not cost hours of answers.
        for number, ids in enumerate(encoded, start=1):
            if len(ids) >= self.context_length:
                raise DataError(
                    f"question {number} has {len(ids)} tokens, which fill the model's limit of {self.context_length}",
                    "leave such questions out, or use a model with a longer context",
                )
        return self._answers(encoded, sampling, batch, progress)

    def answers_that_fit(
        self, prompts: Sequence[Prompt], sampling: Sampling, batch: int, progress: Callable[[int], None]
    ) -> list[str | None]:
        """The answers, and None for each prompt that leaves no room for one."""
        encoded = [self.encode(prompt) for prompt in prompts]
        fitting = [ids for ids in encoded if len(ids) < self.context_length]
        answers = iter(self._answers(fitting, sampling, batch, progress))
        return [next(answers) if len(ids) < self.context_length else None for ids in encoded]

    def _answers(
        self, encoded: Sequence[list[int]], sampling: Sampling, batch: int, progress: Callable[[int], None]
    ) -> list[str]:
        answers = [""] * len(encoded)
        done = 0
        # Prompts of similar length share memory, so that one long prompt does not make all rows long.
        for places in batches_by_length(encoded, 8 * batch):
            requests = [self._request(encoded[place], sampling, sampling.seed + place) for place in places]
            for place, ids in zip(places, self.continued(requests, sampling, batch, progress, done), strict=True):
                answers[place] = self.decode(ids)
            done += len(places)
        return answers

    def converse(self, prompts: Sequence[Prompt], reply: Reply, sampling: Sampling, batch: int) -> None:
        """Hold several conversations, of which `batch` are being answered at a time."""
        conversations: list[int] = []
        """Of each request."""

        def request(conversation: int, prompt: Prompt | None) -> Request | None:
            ids = [] if prompt is None else self.encode(prompt)
            if len(ids) >= self.context_length:
                reply(conversation, None)
            elif ids:
                conversations.append(conversation)
                return self._request(ids, sampling, sampling.seed + conversation)
            return None

        def answered(number: int, generated: Generated) -> Request | None:
            conversation = conversations[number]
            return request(conversation, reply(conversation, self.decode(_without_end(generated))))

        first = [one for number, prompt in enumerate(prompts) if (one := request(number, prompt))]
        if first:
            self._generate(first, sampling, batch, FollowUp(answered, self.context_length, sampling.max_new_tokens))

    def _request(self, ids: list[int], sampling: Sampling, seed: int) -> Request:
        return Request(ids, min(self.context_length - len(ids), sampling.max_new_tokens), seed)

    def continued(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        batch: int,
        progress: Callable[[int], None] = lambda _: None,
        done: int = 0,
    ) -> list[list[int]]:
        """New tokens of each request, without the one that ends it; `progress` counts on from `done`."""
        generated = self._generate(requests, sampling, batch, on_ended=lambda ended: progress(done + ended))
        return [_without_end(one) for one in generated]

    def _generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        batch: int,
        follow_up: FollowUp | None = None,
        on_ended: Callable[[int], None] = lambda _: None,
    ) -> list[Generated]:
        return generate_batch(
            self.model,
            requests,
            rows=batch,
            sampler=Sampler(sampling.temperature, sampling.top_p),
            stop_tokens=self.stop_tokens,
            on_ended=on_ended,
            follow_up=follow_up,
        )

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
        cache = self._kept.begin(ids, len(ids) + most, len(ids) + most)
        forward = cached_forward(self.model, cache=cache)
        choose = chooser(sampling.temperature, sampling.top_p, sampling.seed)
        written: list[int] = []
        shown = ""
        try:
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
        finally:
            self._kept.keep([*ids, *written], cache)

    @cached_property
    def _kept(self) -> KeptPrompts:
        return KeptPrompts(self.model)


def _check_shown(prompt: Prompt, text: str) -> None:
    """A template that leaves something out would make the model answer another question than it was asked."""
    if any(tool["function"]["name"] not in text for tool in prompt.tools):
        raise DataError(
            "the model's chat template does not show tools to the model",
            "leave the tools out, describe them in a system message, or fine-tune with chat.template=FILE",
        )
    for number, message in enumerate(prompt.messages):
        if message["role"] == "system" and message["content"].strip() not in text:
            raise DataError(f"the model's chat template leaves out the system message {number}", "put it first")


def _without_end(generated: Generated) -> list[int]:
    return generated.tokens[:-1] if generated.ended else generated.tokens


def cached_forward(model: Transformer, capacity: int = 0, cache: KeyValueCache | None = None) -> Forward:
    """A forward for `generate`: all tokens so far in, logits of the last one out, with a key-value cache."""
    device = next(model.parameters()).device
    cache = cache or KeyValueCache(model.config.layers, capacity)

    def forward(tokens: Tensor) -> Tensor:
        logits: Tensor = model(tokens[:, cache.length :].to(device), cache=cache, last_only=True)[0, -1]
        return logits

    return forward


def open_chat_model(
    where: Path,
    device: str = "auto",
    tokenizer: Path | None = None,
    *,
    start: bool = False,
    only: str = "",
    dtype: torch.dtype = torch.float32,
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
        model=model.to(device=chosen, dtype=dtype),
        config=config,
        step=step,
        tokenizer=loaded,
        template=template,
        stop_tokens=end_tokens(path, loaded, template),
    )
