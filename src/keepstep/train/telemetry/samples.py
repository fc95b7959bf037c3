"""Sample texts during a run: the model continues the run's prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from keepstep.config.schema import EvaluateConfig, ModelConfig
from keepstep.core.errors import ConfigError
from keepstep.data import tokenization
from keepstep.data.tokenization import END_OF_TEXT
from keepstep.evaluate.generate import stream
from keepstep.models.transformer import Transformer

_NEVER = -1
"""End of text where the tokenizer has no token for it: no choice is ever this."""


@dataclass(frozen=True)
class Prompts:
    """The run's prompts as tokens, each with the number of tokens that may follow it."""

    texts: tuple[str, ...]
    tokens: list[list[int]]
    rooms: list[int]
    tokenizer: Any
    end: int

    @classmethod
    def of(cls, options: EvaluateConfig, model: ModelConfig, tokenizer: Path | None) -> Prompts | None:
        """None where the run has no prompts; a ConfigError where they do not fit the model."""
        if not options.prompts:
            return None
        if tokenizer is None:
            raise ConfigError(
                "evaluate.prompts are texts, but the data comes without a tokenizer",
                "data.tokenizer=PATH/tokenizer.json, or evaluate.prompts=[]",
            )
        loaded = tokenization.load(tokenizer)
        end = loaded.token_to_id(END_OF_TEXT)
        end = _NEVER if end is None else end
        # An empty prompt is the beginning of a document.
        tokens = [loaded.encode(text, add_special_tokens=False).ids or [max(0, end)] for text in options.prompts]
        limit = max(model.max_positions, model.seq_len)
        for number, ids in enumerate(tokens):
            if len(ids) >= limit or max(ids) >= model.vocab:
                raise ConfigError(
                    f"evaluate.prompts[{number}] has {len(ids)} tokens with ids up to {max(ids)}, but the model takes "
                    f"fewer than {limit} tokens, with ids below {model.vocab}",
                    "a shorter prompt, or the tokenizer of this model's data",
                )
        rooms = [min(options.prompt_tokens, limit - len(ids)) for ids in tokens]
        return cls(options.prompts, tokens, rooms, loaded, end)

    def continued(
        self, model: Transformer, device: torch.device, stop: Callable[[], bool]
    ) -> Iterator[tuple[str, str]]:
        """Each prompt and what the model writes after it; no more after a stop request. Every process calls this.

        Sharded weights are gathered for each token, so all processes compute every token and use the first one's
        choice: if two differed, one would end its text while the other waits for it.
        """
        stopped = False

        def forward(tokens_bt: Tensor) -> Tensor:
            logits: Tensor = model(tokens_bt.to(device), last_only=True)
            return logits[0, -1]

        def choose(logits_v: Tensor) -> int:
            nonlocal stopped
            choice = torch.tensor([int(logits_v.argmax()), int(stop())])
            dist.broadcast(choice, src=0)
            token, asked = choice.tolist()
            stopped = bool(asked)
            return self.end if stopped else int(token)

        for text, ids, room in zip(self.texts, self.tokens, self.rooms, strict=True):
            # Rows grow token by token: compiled blocks would be compiled again for each length.
            with torch.compiler.set_stance("force_eager"):
                written = list(stream(forward, ids, choose, max_new_tokens=room, eos=self.end))
            if stopped:
                return
            yield text, self.tokenizer.decode(written, skip_special_tokens=False)
