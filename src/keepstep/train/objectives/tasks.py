"""What rollouts need of the data: prompts by number, the tokens that end an answer, and text for rewards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from keepstep.core.errors import UsageError
from keepstep.data import tokenization
from keepstep.data.chat.prompts import PromptSet
from keepstep.data.chat.template import find_template
from keepstep.data.chat.tokenizer import end_tokens
from keepstep.data.loader import Loaders


@dataclass(frozen=True)
class PromptTasks:
    """The prompts of a run."""

    prompts: PromptSet
    stop_tokens: frozenset[int]
    tokenizer: Any

    @classmethod
    def of(cls, loaders: Loaders | None, template: str) -> PromptTasks:
        """From the run's data; `template` as in `chat.template`."""
        if loaders is None or loaders.prompts is None or loaders.tokenizer is None:
            raise UsageError("rl.method needs prompts, which this command does not read", "use keepstep finetune")
        tokenizer = tokenization.load(loaders.tokenizer)
        ends = end_tokens(loaders.tokenizer, tokenizer, find_template(loaders.tokenizer, template))
        return cls(loaders.prompts, ends, tokenizer)

    def decode(self, tokens: list[int]) -> str:
        """The text of an answer, with the special tokens that calls are written with, without the one that ends it."""
        kept = tokens[:-1] if tokens[-1] in self.stop_tokens else tokens
        text: str = self.tokenizer.decode(kept, skip_special_tokens=False)
        return text
