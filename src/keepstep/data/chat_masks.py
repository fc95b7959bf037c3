"""From a rendered conversation to token ids and a mask that is exact to the byte.

The text is cut where the assistant begins and ends to speak and each piece is encoded for itself where a token would
reach across, so no token is partly masked. That is also what a model meets when it answers: a prompt, encoded on its
own, and then its own tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from keepstep.data.chat_rows import Conversation, Message
from keepstep.data.chat_template import ChatTemplate, Rendered, Span

LossOn = Literal["assistant", "tool_calls", "all"]


@dataclass(frozen=True)
class MaskedTokens:
    """A conversation as token ids; `loss` is true for what the assistant says."""

    tokens: NDArray[np.int32]
    loss: NDArray[np.bool_]


def encode(
    conversation: Conversation, template: ChatTemplate, tokenizer: Any, loss_on: LossOn = "assistant"
) -> MaskedTokens:
    """Render and encode; with `tool_calls` only turns that call something carry a loss, with `all` everything does.

    Raises BadRow where a template cannot render the conversation.
    """
    return encode_rendered(keep_turns(template.render(conversation), conversation, loss_on), tokenizer)


def keep_turns(rendered: Rendered, conversation: Conversation, loss_on: LossOn) -> Rendered:
    """Only the spans that are to carry a loss; a turn of weight 0 carries none, unless everything does."""
    if loss_on == "all":
        return Rendered(rendered.text, (Span(0, len(rendered.text), 0),))

    def learnt(message: Message) -> bool:
        return message.get("weight") != 0 and (loss_on == "assistant" or bool(message.get("tool_calls")))

    spans = tuple(span for span in rendered.spans if learnt(conversation.messages[span.message]))
    return Rendered(rendered.text, spans)


def encode_rendered(rendered: Rendered, tokenizer: Any) -> MaskedTokens:
    """Token ids with their mask."""
    encoding = tokenizer.encode(rendered.text, add_special_tokens=False)
    edges = sorted({edge for span in rendered.spans for edge in (span.start, span.end)})
    offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    starts, ends = offsets[:, 0], offsets[:, 1]
    # Some tokenizers leave white space out of their offsets: a token may reach as far as its neighbours' offsets do.
    before, after = np.append(0, ends), np.append(starts, len(rendered.text))
    if any(
        bool(((starts < edge) & (edge < ends)).any() or ((before < after) & (before <= edge) & (edge <= after)).any())
        for edge in edges
    ):
        return _piecewise(rendered, edges, tokenizer)
    loss = np.zeros(len(encoding.ids), dtype=np.bool_)
    for span in rendered.spans:
        loss |= (starts >= span.start) & (starts < span.end)
    return MaskedTokens(np.array(encoding.ids, dtype=np.int32), loss)


def _piecewise(rendered: Rendered, edges: list[int], tokenizer: Any) -> MaskedTokens:
    bounds = [0, *edges, len(rendered.text)]
    # A turn that says nothing begins where the next one does, and that is somebody else's.
    spoken = {span.start for span in rendered.spans if span.end > span.start}
    ids: list[int] = []
    loss: list[bool] = []
    for start, end in pairwise(bounds):
        piece = tokenizer.encode(rendered.text[start:end], add_special_tokens=False).ids
        ids += piece
        loss += [start in spoken and end > start] * len(piece)
    return MaskedTokens(np.array(ids, dtype=np.int32), np.array(loss, dtype=np.bool_))
