"""Quantities carry their unit, and reading back what was written gives the same quantity."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.units import ByteSize, Duration, format_bytes, format_count, format_seconds


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("100ba", 100, "ba"),
        ("2ep", 2, "ep"),
        ("0.5ep", 0.5, "ep"),
        ("1e9tok", 1e9, "tok"),
        ("1_000sp", 1000, "sp"),
        ("30s", 30, "s"),
        ("10min", 600, "s"),
        ("1.5h", 5400, "s"),
        ("1d", 86400, "s"),
        (" 5 ba ", 5, "ba"),
    ],
)
def test_durations_are_read(text: str, value: float, unit: str) -> None:
    duration = Duration.parse(text)
    assert (duration.value, duration.unit) == (value, unit)


@pytest.mark.parametrize("text", ["100", "ba", "", "-1ba", "1.5ba", "1 week", "1ba2", "1,000ba"])
def test_a_duration_without_a_known_unit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"unit|whole"):
        Duration.parse(text)


@given(value=st.integers(0, 10**15), unit=st.sampled_from(["ba", "ep", "tok", "sp", "s"]))
def test_whole_durations_survive_writing(value: int, unit: str) -> None:
    assert Duration.parse(f"{value}{unit}") == Duration.parse(str(Duration.parse(f"{value}{unit}")))
    assert str(Duration.parse(f"{value}{unit}")) == f"{value}{unit}"


@given(value=st.floats(0, 1e12))
def test_fractions_of_epochs_survive_writing(value: float) -> None:
    assert Duration.parse(str(Duration(value, "ep"))) == Duration(value, "ep")


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("512MiB", 512 * 1024**2),
        ("64GiB", 64 * 1024**3),
        ("2TB", 2 * 1000**4),
        ("1.5GiB", 1610612736),
        ("7B", 7),
        ("4Ki", 4096),
    ],
)
def test_sizes_are_read(text: str, size_bytes: int) -> None:
    assert ByteSize.parse(text).bytes == size_bytes


@pytest.mark.parametrize("text", ["64", "64G", "GiB", "-1GiB", "1 XB"])
def test_a_size_without_a_known_unit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="unit"):
        ByteSize.parse(text)


@given(size_bytes=st.integers(0, 2**53))
def test_sizes_survive_writing(size_bytes: int) -> None:
    assert ByteSize.parse(str(ByteSize(size_bytes))) == ByteSize(size_bytes)


def test_numbers_are_written_for_people() -> None:
    assert [format_bytes(size) for size in (0, 1023, 1536, 1.5 * 1024**3)] == ["0 B", "1023 B", "1.5 KiB", "1.5 GiB"]
    assert [format_seconds(s) for s in (0, 59.4, 192, 7500, 273600)] == ["0s", "59s", "3m12s", "2h05m", "3d04h"]
    assert [format_count(n) for n in (7, 12345, 1_235_000, 8.03e9)] == ["7", "12.3k", "1.24M", "8.03B"]


def test_a_damaged_time_is_written_too() -> None:
    assert format_seconds(float("inf")) == format_seconds(1e12) == "11574074d01h"


@pytest.mark.parametrize(
    ("share", "whole", "length"),
    [
        ("0.02dur", "1000ba", "20ba"),
        ("0.1dur", "2ep", "0.2ep"),
        ("0.5dur", "1e6tok", "500000tok"),
        ("5ba", "9ba", "5ba"),
    ],
)
def test_a_share_of_the_run_becomes_a_length(share: str, whole: str, length: str) -> None:
    assert Duration.parse(share).share_of(Duration.parse(whole)) == Duration.parse(length)


@pytest.mark.parametrize(("seconds", "text"), [("nan", "–"), ("inf", "11574074d01h"), ("-inf", "-1000000000000s")])
def test_seconds_of_a_damaged_record_are_shown(seconds: str, text: str) -> None:
    assert format_seconds(float(seconds)) == text
