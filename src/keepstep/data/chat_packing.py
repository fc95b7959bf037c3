"""Several documents in one row: a pure function from lengths to rows, so that every process packs alike."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def pack(lengths: Sequence[int] | NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Document numbers for each row: longest first, each into the fullest row that still has room (best fit).

    Rows hold at most `capacity` tokens. A document that is longer than that is an error of the caller.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if sizes.size and int(sizes.max()) > capacity:
        raise ValueError(f"a document of {int(sizes.max())} tokens does not fit a row of {capacity}")
    rows: list[list[int]] = []
    open_rows: list[list[int]] = [[] for _ in range(capacity + 1)]
    """Rows by the room they have left."""
    rooms = 0
    """One bit for each room that some row has, so that the smallest that fits is found at once."""
    for number in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[number])
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            row = open_rows[room].pop()
            if not open_rows[room]:
                rooms ^= 1 << room
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(number)
        left = room - size
        if left:
            open_rows[left].append(row)
            rooms |= 1 << left
    return rows
