"""Constrained decoding: of the tokens that a model proposes, only those that keep the answer within a grammar.

The syntax of a call is that of the model's own chat template: a call is rendered, and the name and the arguments in it
are the places that the grammar fills.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from keepstep.data.chat.rows import BadRow, Conversation, Tool, call
from keepstep.evaluate.chat_model import ChatModel
from keepstep.serve.chat_completions import CALL_MARKS
from keepstep.serve.json_grammar import Free, States, advance, may_end, must_end, start
from keepstep.serve.json_schema import compile_schema

_NAME, _ARGUMENT = "keepstep_function", "keepstep_argument"
_DRAWS = 32
"""Tokens that are drawn before all others are tried in the order of their probability."""


@dataclass(frozen=True)
class CallSyntax:
    """What a template writes before the name of a function, between name and arguments, and after them."""

    before: str
    between: str
    after: str

    def states(self, tools: Sequence[Tool], names: Sequence[str], strict: Sequence[str]) -> States:
        """The grammar of one call of one of these functions. Raises SchemaError."""
        schemas = {name: schema for name, schema in _schemas(tools).items() if name in names}
        return self._calls(self.before, schemas, strict)

    def free_states(self, tools: Sequence[Tool], strict: Sequence[str]) -> States:
        """Any text, in which calls name a tool and those of `strict` ones fit its schema. Raises SchemaError.

        A call is one from its opening mark on. Where the template has none, an answer that starts like a call is one.
        """
        schemas = {name: schema if name in strict else {"type": "object"} for name, schema in _schemas(tools).items()}
        before = self.before.lstrip()
        mark = next((mark for mark in CALL_MARKS if mark in before), before[:1])
        calls = self._calls(before.partition(mark)[2], schemas, strict)
        return start(Free(mark, calls, only_first=mark not in CALL_MARKS))

    def _calls(self, before: str, schemas: Mapping[str, Any], strict: Sequence[str]) -> States:
        made = (
            start(before + name + self.between, compile_schema(schema, strict=name in strict), self.after)
            for name, schema in schemas.items()
        )
        return frozenset().union(*made)


def _schemas(tools: Sequence[Tool]) -> dict[str, Any]:
    return {item["function"]["name"]: item["function"]["parameters"] for item in tools}


def call_syntax(model: ChatModel) -> CallSyntax | None:
    """How the model's template writes a call; None if it is not name and JSON."""
    schema = {"type": "object", "properties": {_ARGUMENT: {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": _NAME, "description": "?", "parameters": schema}}
    answer = {"role": "assistant", "content": "", "tool_calls": [{"id": "a1b2c3d4e", **call(_NAME, {_ARGUMENT: 1})}]}
    try:
        rendered = model.template.render(Conversation(({"role": "user", "content": "?"}, answer), (tool,)))
    except BadRow:
        return None
    text = rendered.text[rendered.spans[-1].start : rendered.spans[-1].end]
    text = text.rstrip().removesuffix(model.template.turn_end() or "\0")
    before, found, rest = text.partition(_NAME)
    for written in (json.dumps({_ARGUMENT: 1}), json.dumps({_ARGUMENT: 1}, separators=(",", ":"))):
        between, there, after = rest.partition(written)
        if found and there:
            return CallSyntax(before, between, after.rstrip())
    return None


@dataclass
class TokenTexts:
    """The text of each token as it stands after another one, found when it is first asked for."""

    decode: Callable[[list[int]], str]
    _anchor: int = 0
    _known: dict[int, str] = field(default_factory=dict)

    def __getitem__(self, token: int) -> str:
        if token not in self._known:
            before = self.decode([self._anchor])
            self._known[token] = self.decode([self._anchor, token])[len(before) :]
        return self._known[token]


@dataclass
class Constraint:
    """The grammar of one answer, and how far the answer has come in it."""

    states: States
    texts: TokenTexts

    def choose(self, logits_v: Tensor, choose: Callable[[Tensor], int], ends: frozenset[int]) -> int | None:
        """A token that fits, by the model's probabilities; None where the answer is complete."""
        if must_end(self.states):
            return None
        logits_v = logits_v.clone()
        for _ in range(_DRAWS):
            token = choose(logits_v)
            if token in ends and may_end(self.states):
                return None
            # A token that ends an answer is no text, not even inside a string.
            if token not in ends and self._accept(token):
                return token
            # Drawn again without it: the same as a draw among those that fit.
            logits_v[token] = float("-inf")
        order: list[int] = logits_v.argsort(descending=True).tolist()
        return next((token for token in order if token not in ends and self._accept(token)), None)

    def _accept(self, token: int) -> bool:
        text = self.texts[token]
        after = advance(self.states, text) if text else frozenset()
        if after:
            self.states = after
        return bool(after)
