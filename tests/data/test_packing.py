"""Strategies: every token where it belongs, padding without loss, and documents cut only where they must be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from keepstep.core.errors import ConfigError, DataError
from keepstep.data.batch import to_batch
from keepstep.data.packing import BestFitRows, OverflowRows, StreamRows, TruncRows, best_fit

sizes = st.lists(st.integers(0, 40), min_size=1, max_size=40)
LENGTH = 12


class Store:
    """Document d holds the tokens d × 100, d × 100 + 1, …"""

    name = "store"

    def __init__(self, sizes: list[int]) -> None:
        self.lengths = np.array(sizes, dtype=np.int64)

    def part(self, document: int, offset: int, count: int) -> NDArray[Any]:
        assert offset + count <= self.lengths[document]
        return np.arange(document * 100 + offset, document * 100 + offset + count)


def texts(rows: Any) -> list[list[int]]:
    found = rows.read(np.arange(rows.count))
    return [row[:filled].tolist() for row, filled in zip(found.tokens, found.filled, strict=True)]


@given(sizes=sizes)
def test_best_fit_keeps_every_token_and_cuts_only_long_documents(sizes: list[int]) -> None:
    store = Store(sizes)
    rows = BestFitRows(store, LENGTH, 10_000)
    found = texts(rows)
    assert sorted(token for row in found for token in row) == [
        number * 100 + place for number, size in enumerate(sizes) for place in range(size)
    ]
    rows_of = {number: [row for row in found if number * 100 in row] for number, size in enumerate(sizes) if size}
    for number, holders in rows_of.items():
        if sizes[number] <= LENGTH + 1:
            assert set(range(number * 100, number * 100 + sizes[number])) <= set(holders[0])


@given(sizes=st.lists(st.integers(1, 50), max_size=60), room=st.just(50))
def test_best_fit_never_overfills_and_leaves_no_two_rows_that_fit_in_one(sizes: list[int], room: int) -> None:
    row_of = best_fit(np.array(sizes, dtype=np.int64), room)
    loads = np.sort(np.bincount(row_of, weights=sizes)) if sizes else np.zeros(0)
    assert np.all(loads <= room)
    assert len(loads) < 2 or loads[0] + loads[1] > room


def _fewest_rows(sizes: list[int], room: int) -> int:
    """By trying every subset: the fewest rows for it, and how full the last of them must be."""
    best: list[tuple[int, int]] = [(1, 0)]
    for subset in range(1, 1 << len(sizes)):
        found = []
        for item, size in enumerate(sizes):
            if subset >> item & 1:
                rows, load = best[subset ^ 1 << item]
                found.append((rows, load + size) if load + size <= room else (rows + 1, size))
        best.append(min(found))
    return best[-1][0]


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=9), room=st.just(50))
@example(sizes=[24, 24, 24, 27, 27, 27, 27], room=50)
def test_best_fit_wastes_little(sizes: list[int], room: int) -> None:
    rows = len(set(best_fit(np.array(sizes, dtype=np.int64), room).tolist()))
    # The bound that is proven for best-fit decreasing.
    assert rows <= (11 * _fewest_rows(sizes, room) + 6) / 9


@given(sizes=sizes)
def test_trunc_gives_each_document_one_row(sizes: list[int]) -> None:
    found = texts(TruncRows(Store(sizes), LENGTH, 10_000))
    assert found == [[number * 100 + place for place in range(min(size, 13))] for number, size in enumerate(sizes)]


@given(sizes=sizes, stride=st.integers(1, LENGTH))
def test_overflow_covers_every_token_with_the_overlap_asked_for(sizes: list[int], stride: int) -> None:
    found = texts(OverflowRows(Store(sizes), LENGTH, 10_000, stride))
    for number, size in enumerate(sizes):
        mine = [row for row in found if row and row[0] // 100 == number]
        assert {token for row in mine for token in row} == set(range(number * 100, number * 100 + size))
        assert [row[0] for row in mine] == [number * 100 + stride * place for place in range(len(mine))]


@given(sizes=sizes)
def test_a_stream_over_documents_is_their_concatenation(sizes: list[int]) -> None:
    rows = StreamRows(Store(sizes), LENGTH, 10_000, bounds=True)
    stream = [number * 100 + place for number, size in enumerate(sizes) for place in range(size)]
    found = rows.read(np.arange(rows.count))
    assert found.tokens.tolist() == [
        stream[start : start + LENGTH + 1] for start in range(0, len(stream) - LENGTH, LENGTH)
    ]
    assert found.documents is not None
    changes = np.diff(found.tokens // 100, axis=1) != 0
    assert np.array_equal(np.diff(found.documents, axis=1) != 0, changes)


def test_padding_and_the_next_document_take_no_part_in_the_loss() -> None:
    batch = to_batch(BestFitRows(Store([4, 5]), LENGTH, 10_000).read(np.array([0])), 0)
    assert batch.inputs[0].tolist()[:9] == [0, 1, 2, 3, 100, 101, 102, 103, 104]
    assert batch.targets[0].tolist() == [1, 2, 3, -100, 101, 102, 103, 104, -100, -100, -100, -100]
    assert batch.documents is not None
    assert batch.documents[0].tolist() == [0] * 4 + [1] * 5 + [2] * 3
    assert batch.positions is not None
    assert batch.positions[0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2]


def test_a_stride_out_of_range_and_a_foreign_token_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.stride is 13"):
        OverflowRows(Store([5]), LENGTH, 10_000, 13)
    with pytest.raises(DataError, match="holds token 104"):
        TruncRows(Store([5, 5]), LENGTH, 104).read(np.array([0, 1]))
