"""Conversations as a model sees them, in colour: what the assistant says, and learns from, stands out.

In a terminal the learnt text is green on dark; without colour it stands between ⟦ and ⟧, so a copied text keeps it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.core.errors import UsageError
from keepstep.data import tokenize
from keepstep.data.chat_files import FormatName, Reject, read_conversations
from keepstep.data.chat_generate import generate_rows
from keepstep.data.chat_masks import LossOn, encode_rendered, keep_turns
from keepstep.data.chat_rows import BadRow, Conversation
from keepstep.data.chat_template import ChatTemplate, Rendered, find_template

LEARNT, PLAIN, FAINT, BAD, RESET = "\x1b[1;32m", "\x1b[0m", "\x1b[2m", "\x1b[1;31m", "\x1b[0m"
GENERATED = "toolcalls"


@dataclass(frozen=True)
class ShowOptions:
    """What to show of which rows."""

    path: str
    rows: int = 3
    first: int = 1
    tokenizer: Path | None = None
    template: str = ""
    form: FormatName = "auto"
    loss_on: LossOn = "assistant"
    colour: bool = True
    tokens: bool = False


def show_rows(options: ShowOptions) -> Iterator[str]:
    """Lines for the terminal: a heading and the rendered text of each row, refused rows with their reason."""
    template = find_template(options.tokenizer, options.template)
    tokenizer = tokenize.load(options.tokenizer) if options.tokenizer else None
    shown = number = 0
    for number, (name, item) in enumerate(_rows(options), start=1):
        if number < options.first:
            continue
        if shown == options.rows:
            return
        shown += 1
        yield from _one(name, item, template, tokenizer, options)
    if not shown:
        raise UsageError(
            f"--first is {options.first}, but {options.path} has {number:,} rows",
            f"--first 1 to {number}" if number else "give conversations, one a row",
        )


def _rows(options: ShowOptions) -> Iterator[tuple[str, Conversation | Reject]]:
    if options.path == GENERATED:
        for number, row in enumerate(generate_rows(options.first + options.rows, 0, "train"), start=1):
            yield f"generated row {number}, {row.category}", row.conversation
        return
    for item in read_conversations(Path(options.path), options.form):
        yield f"{item.file} row {item.row}", item if isinstance(item, Reject) else item.conversation


def _one(
    name: str, item: Conversation | Reject, template: ChatTemplate, tokenizer: Any, options: ShowOptions
) -> Iterator[str]:
    reason = item.reason if isinstance(item, Reject) else ""
    rendered: Rendered | None = None
    if not isinstance(item, Reject):
        try:
            rendered = keep_turns(template.render(item), item, options.loss_on)
        except BadRow as bad:
            reason = str(bad)
    if rendered is None:
        yield _paint(f"── {name}: refused: {reason}", BAD, options.colour)
        yield ""
        return
    facts = f"{sum(span.end - span.start for span in rendered.spans)} of {len(rendered.text)} characters learnt"
    if tokenizer is not None:
        row = encode_rendered(rendered, tokenizer)
        facts += f", {int(row.loss.sum())} of {len(row.tokens)} tokens"
    yield _paint(f"── {name}: {facts}", FAINT, options.colour)
    yield (
        _tokens(rendered, tokenizer, options) if options.tokens and tokenizer else paint_mask(rendered, options.colour)
    )
    yield ""


def paint_mask(rendered: Rendered, colour: bool) -> str:
    """The text with what is learnt marked."""
    pieces, at = [], 0
    for span in rendered.spans:
        pieces += [rendered.text[at : span.start], _learnt(rendered.text[span.start : span.end], colour)]
        at = span.end
    return "".join([*pieces, rendered.text[at:]]).rstrip("\n")


def _tokens(rendered: Rendered, tokenizer: Any, options: ShowOptions) -> str:
    row = encode_rendered(rendered, tokenizer)
    pieces = []
    for token, learnt in zip(row.tokens.tolist(), row.loss.tolist(), strict=True):
        text = tokenizer.decode([token], skip_special_tokens=False) + "·"
        pieces.append(_learnt(text, options.colour) if learnt else text)
    return "".join(pieces)


def _learnt(text: str, colour: bool) -> str:
    if not colour:
        return f"⟦{text}⟧"
    # Colour is set again on every line: pagers and pictures cut at line ends.
    return "\n".join(f"{LEARNT}{line}{RESET}" for line in text.split("\n"))


def _paint(text: str, colour: str, wanted: bool) -> str:
    return f"{colour}{text}{RESET}" if wanted else text
