"""Why conversations were rejected: the most frequent reasons, each with a remedy."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

_SHOWN = 3
_REMEDIES = (
    ("do not fit a row", "raise model.seq_len, or split these conversations"),
    ("carries a loss", "rows need a turn of the assistant that chat.loss_on selects"),
    ("single tool-calls", "write one call per turn, or name a template with parallel calls: chat.template=FILE"),
    (
        "must alternate",
        "merge neighbouring turns of one role; tools need chat.template=FILE that knows them",
    ),
    ("leaves out", "name a template that renders tool calls: chat.template=FILE"),
    (
        "differently when",
        "leave out the system message, end rows after one answer, or set another chat.template=FILE",
    ),
    ("chat template", "change the rows, or name another template: chat.template=FILE"),
)


def frequent_reasons(rejects: Path) -> Iterator[str]:
    """Lines for the terminal about a file of rejected rows: count, reason, and what to do about it."""
    counts, examples = Counter[str](), dict[str, str]()
    with rejects.open(encoding="utf-8") as file:
        for line in file:
            reason = str(json.loads(line)["reason"])
            # Rows that are too long by different numbers of tokens have one reason.
            alike = re.sub(r"\d+", "N", reason)
            counts[alike] += 1
            examples.setdefault(alike, reason)
    for alike, count in counts.most_common(_SHOWN):
        yield f"{count:,} × {examples[alike][:200]}"
        remedy = next((remedy for part, remedy in _REMEDIES if part in alike), "")
        if remedy:
            yield f"  hint: {remedy}"
    if len(counts) > _SHOWN:
        yield f"{len(counts) - _SHOWN} more reasons"
