import json
import math
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keepstep.core.errors import UsageError
from keepstep.observe.run_folder import (
    JsonLines,
    RunFolder,
    find_run,
    find_runs,
    number,
    read_from,
    read_last_step,
    split_kinds,
)


def test_json_lines_are_readable_immediately(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "deep" / "metrics.jsonl")
    lines.append({"step": 1, "loss": 2.5, "name": "é"})
    lines.append({"step": 2, "loss": np.float32(1.5), "list": np.arange(2)})
    assert lines.read() == [{"step": 1, "loss": 2.5, "name": "é"}, {"step": 2, "loss": 1.5, "list": [0, 1]}]


def test_json_lines_skips_a_torn_last_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    assert JsonLines(path).read() == [{"step": 1}]
    JsonLines(path).append({"step": 3})
    assert JsonLines(path).read() == [{"step": 1}, {"step": 3}]


def test_json_lines_survives_half_a_line_of_another_writer(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    agent = JsonLines(path)
    agent.append({"kind": "restart"})
    with path.open("a") as killed:
        killed.write('{"kind": "checkpo')
    agent.append({"kind": "fault"})
    assert JsonLines(path).read() == [{"kind": "restart"}, {"kind": "fault"}]


def test_json_lines_recovers_from_a_full_disk(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.append({"step": 1})
    room = (tmp_path / "metrics.jsonl").stat().st_size + 5
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    open_files = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        for _ in range(5):
            with pytest.raises(OSError, match=r"were written|too large"):
                lines.append({"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(list(Path("/proc/self/fd").iterdir())) == open_files
    lines.append({"step": 3})
    assert lines.read() == [{"step": 1}, {"step": 3}]


def test_json_lines_writes_file_names_that_are_not_utf8(tmp_path: Path) -> None:
    told = {"what": f"no file {os.fsdecode(b'caf' + bytes([0xE9]))}"}
    lines = JsonLines(tmp_path / "events.jsonl")
    lines.append(told)
    assert lines.read() == [told]


def test_json_lines_skips_damaged_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\xff\xfe garbage\n[1, 2]\n{"step": 2}\n')
    assert JsonLines(path).read() == [{"step": 1}, {"step": 2}]


def test_read_from_leaves_half_a_line_for_later(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st')
    first, offset = read_from(path)
    with path.open("a") as file:
        file.write('ep": 2}\n')
    second, _ = read_from(path, offset)
    assert (first, second) == ([{"step": 1}], [{"step": 2}])


def test_read_from_a_missing_file_is_empty(tmp_path: Path) -> None:
    assert read_from(tmp_path / "absent.jsonl") == ([], 0)


def test_json_lines_round_trips_nan_and_infinity(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    JsonLines(path).append({"loss": math.nan, "grad_norm": math.inf})
    raw = json.loads(path.read_text(), parse_constant=lambda text: (_ for _ in ()).throw(ValueError(text)))
    assert math.isnan(number(raw["loss"]))
    assert number(raw["grad_norm"]) == math.inf
    assert math.isnan(number(None))
    assert math.isnan(number("text"))


def test_after_a_resume_the_later_attempt_wins_and_the_abandoned_tail_is_gone() -> None:
    lines = [{"step": step, "loss": float(step)} for step in range(1, 8)]
    lines += [{"step": 4, "valid_loss": 9.0}]
    lines += [{"step": step, "loss": -float(step)} for step in (4, 5)]
    lines += [{"step": 4, "valid_loss": 8.0}, {"no_step": True}]
    kinds = split_kinds(lines)
    assert [(line["step"], line["loss"]) for line in kinds["train"]] == [(1, 1), (2, 2), (3, 3), (4, -4), (5, -5)]
    assert [(line["step"], line["valid_loss"]) for line in kinds["valid"]] == [(4, 8.0)]


def test_find_runs_skips_other_folders_and_outward_links(tmp_path: Path) -> None:
    runs, outside = tmp_path / "runs", tmp_path / "outside"
    for place in (runs / "a", runs / "b", outside):
        JsonLines(RunFolder(place).create().metrics).append({"step": 1})
    (runs / "notes").mkdir()
    (runs / "link").symlink_to(outside)
    assert [run.name for run in find_runs(runs)] == ["a", "b"]
    assert find_runs(tmp_path / "absent") == []


def test_find_run_takes_names_and_paths_and_hints_at_typos(tmp_path: Path) -> None:
    JsonLines(RunFolder(tmp_path / "llama").create().metrics).append({"step": 1})
    assert find_run("llama", tmp_path).name == "llama"
    assert find_run(str(tmp_path / "llama"), tmp_path).name == "llama"
    with pytest.raises(UsageError) as caught:
        find_run("lama", tmp_path)
    assert caught.value.hint == "did you mean llama?"


def test_read_last_step_after_a_rollback_is_the_current_step(tmp_path: Path) -> None:
    metrics = JsonLines(tmp_path / "metrics.jsonl")
    assert read_last_step(metrics.path) == -1
    for step in (99, 100, 51):
        metrics.append({"step": step, "loss": 1.0})
    metrics.append({"step": 51, "valid_loss": 1.0})
    assert read_last_step(metrics.path) == 51


def test_find_runs_skips_folders_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mine", "theirs"):
        RunFolder(tmp_path / name).create().config.write_text("")
    look = os.stat

    def refuse(path: Any, **words: Any) -> os.stat_result:
        # As the system answers everybody but the superuser, who may run these tests.
        if "theirs/" in os.fspath(path):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return look(path, **words)

    monkeypatch.setattr(os, "stat", refuse)
    assert [run.name for run in find_runs(tmp_path)] == ["mine"]
