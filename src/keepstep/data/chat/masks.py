"""From a rendered conversation to token ids and a loss mask that is exact to the byte, and how a terminal shows it.

Where a token would cross the start or end of an assistant turn, the text is split there and each piece is encoded
separately, so no token is partly masked. At inference it is the same: the prompt is encoded on its own, and the model's
tokens follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from keepstep.core.errors import DataError, UsageError
from keepstep.data import tokenization
from keepstep.data.chat.files import FormatName, RejectedRow, read_conversations
from keepstep.data.chat.generated import GENERATED, generate_rows
from keepstep.data.chat.rows import BadRow, Conversation, Message
from keepstep.data.chat.template import ChatTemplate, Rendered, Span, find_template

LossOn = Literal["assistant", "tool_calls", "all"]
LOSS, FAINT, BAD, RESET = "\x1b[1;32m", "\x1b[2m", "\x1b[1;31m", "\x1b[0m"


@dataclass(frozen=True)
class MaskedTokens:
    """A conversation as token ids; `loss` is true for tokens of the assistant."""

    tokens: NDArray[np.int32]
    loss: NDArray[np.bool_]


def render(conversation: Conversation, template: ChatTemplate, loss_on: LossOn) -> Rendered:
    """The text of a conversation with the spans that carry a loss. Raises BadRow.

    With `tool_calls` only turns that call something carry one, with `all` everything does, even a turn of weight 0.
    """
    rendered = template.render(conversation)
    if loss_on == "all":
        return Rendered(rendered.text, (Span(0, len(rendered.text), 0),))

    def has_loss(message: Message) -> bool:
        return message.get("weight") != 0 and (loss_on == "assistant" or bool(message.get("tool_calls")))

    spans = tuple(span for span in rendered.spans if has_loss(conversation.messages[span.message]))
    return Rendered(rendered.text, spans)


def encode_all(rendered: Sequence[Rendered], tokenizer: Any) -> list[MaskedTokens]:
    """Token ids with their masks. All texts are encoded together, which uses every core."""
    encodings = tokenizer.encode_batch([each.text for each in rendered], add_special_tokens=False)
    found = [_whole(each, encoding) for each, encoding in zip(rendered, encodings, strict=True)]
    cut = [_pieces(rendered[place]) if whole is None else [] for place, whole in enumerate(found)]
    texts = [text for pieces in cut for text, _ in pieces]
    parts = iter(tokenizer.encode_batch(texts, add_special_tokens=False) if texts else ())
    return [
        whole or _joined([(next(parts).ids, has_loss) for _, has_loss in pieces])
        for whole, pieces in zip(found, cut, strict=True)
    ]


def _edges(rendered: Rendered) -> list[int]:
    return sorted({edge for span in rendered.spans for edge in (span.start, span.end)})


def _whole(rendered: Rendered, encoding: Any) -> MaskedTokens | None:
    """The tokens of the whole text; None if the start or end of a turn is not at the edge of a token."""
    offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    starts, ends = offsets[:, 0], offsets[:, 1]
    # Some tokenizers leave white space out of their offsets, so a token may extend to its neighbours' offsets.
    before, after = np.append(0, ends), np.append(starts, len(rendered.text))
    if any(
        bool(((starts < edge) & (edge < ends)).any() or ((before < after) & (before <= edge) & (edge <= after)).any())
        for edge in _edges(rendered)
    ):
        return None
    loss = np.zeros(len(encoding.ids), dtype=np.bool_)
    for span in rendered.spans:
        loss |= (starts >= span.start) & (starts < span.end)
    return MaskedTokens(_token_ids(encoding.ids), loss)


def _pieces(rendered: Rendered) -> list[tuple[str, bool]]:
    """The text cut at every turn's start and end, and which pieces have a loss."""
    # An empty turn starts where the next piece starts, which is not the assistant's.
    span_starts = {span.start for span in rendered.spans if span.end > span.start}
    bounds = [0, *_edges(rendered), len(rendered.text)]
    return [(rendered.text[start:end], start in span_starts and end > start) for start, end in pairwise(bounds)]


def _joined(pieces: Sequence[tuple[list[int], bool]]) -> MaskedTokens:
    ids = [token for piece, _ in pieces for token in piece]
    loss = [has_loss for piece, has_loss in pieces for _ in piece]
    return MaskedTokens(_token_ids(ids), np.array(loss, dtype=np.bool_))


def _token_ids(ids: list[int]) -> NDArray[np.int32]:
    try:
        return np.array(ids, dtype=np.int32)
    except OverflowError:
        message = f"the tokenizer has the id {max(ids):,}, but no vocabulary is that large"
        raise DataError(message, "tokenizer.json is damaged: download or export it again") from None


@dataclass(frozen=True)
class ShowOptions:
    """Which rows to show, and how."""

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
    """Lines for the terminal: a heading and the rendered text of each row, or the reason of a rejected one.

    The text that carries a loss is green; without colour it is between ⟦ and ⟧, so that a copied text keeps the marks.
    """
    template = find_template(options.tokenizer, options.template)
    tokenizer = tokenization.load(options.tokenizer) if options.tokenizer else None
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
            f"--first 1 to {number}" if number else "give a file with one conversation in each row",
        )


def _rows(options: ShowOptions) -> Iterator[tuple[str, Conversation | str]]:
    """The name of each row, and its conversation or the reason why it was rejected."""
    if options.path in GENERATED:
        for number, row in enumerate(generate_rows(options.path, options.first + options.rows, 0, "train"), start=1):
            yield f"generated row {number}, {row.category}", row.conversation
        return
    for item in read_conversations(Path(options.path), options.form):
        yield f"{item.file} row {item.row}", item.reason if isinstance(item, RejectedRow) else item.conversation


def _one(
    name: str, item: Conversation | str, template: ChatTemplate, tokenizer: Any, options: ShowOptions
) -> Iterator[str]:
    try:
        if isinstance(item, str):
            raise BadRow(item)
        rendered = render(item, template, options.loss_on)
    except BadRow as bad:
        yield _paint(f"── {name}: rejected: {bad}", BAD, options.colour)
        yield ""
        return
    text, at = "", 0
    for span in rendered.spans:
        text += rendered.text[at : span.start] + _mark_loss(rendered.text[span.start : span.end], options.colour)
        at = span.end
    text = (text + rendered.text[at:]).rstrip("\n")
    facts = f"{sum(span.end - span.start for span in rendered.spans)} of {len(rendered.text)} characters learnt"
    if tokenizer is not None:
        (row,) = encode_all([rendered], tokenizer)
        facts += f", {int(row.loss.sum())} of {len(row.tokens)} tokens"
        if options.tokens:
            decoded = [tokenizer.decode([token], skip_special_tokens=False) + "·" for token in row.tokens.tolist()]
            pairs = zip(decoded, row.loss.tolist(), strict=True)
            text = "".join(_mark_loss(piece, options.colour) if has_loss else piece for piece, has_loss in pairs)
    yield _paint(f"── {name}: {facts}", FAINT, options.colour)
    yield text
    yield ""


def _mark_loss(text: str, colour: bool) -> str:
    if not colour:
        return f"⟦{text}⟧"
    # The colour is set again on every line, because pagers reset it at line ends.
    return "\n".join(f"{LOSS}{line}{RESET}" for line in text.split("\n"))


def _paint(text: str, colour: str, wanted: bool) -> str:
    return f"{colour}{text}{RESET}" if wanted else text
