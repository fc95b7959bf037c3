"""`keepstep bench storage`: the matrix of tiers, measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keepstep.cli.main import main
from keepstep.preflight.storage_benchmark import Cell, markdown


@pytest.mark.slow
def test_bench_storage_measures_every_pair_and_cleans_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "storage", "--size", "4MiB", "--writers", "2", "--out", str(tmp_path / "results.json")]
    for flag, names in (("--data", ("lustre", "blob")), ("--checkpoints", ("nvme", "lustre", "blob"))):
        for name in names:
            (tmp_path / f"{name}{flag}").mkdir()
            words += [flag, f"{name}={tmp_path / f'{name}{flag}'}"]
    assert main(words) == 0
    table = capsys.readouterr().out
    assert table.count("\n| lustre") == 3
    assert table.count("\n| blob") == 3
    cells = json.loads((tmp_path / "results.json").read_text())["cells"]
    assert len(cells) == 6
    for cell in cells:
        assert min(cell[name] for name in ("read_gb_s", "read_while_saving_gb_s", "write_gb_s", "restore_gb_s")) > 0
        assert cell["save_minutes"]["mpt-30b"] == pytest.approx((336 << 30) / cell["write_gb_s"] / 60e9)
    assert "mpt-70b save [min]" in (tmp_path / "results.md").read_text()
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == [
        tmp_path / "results.json",
        tmp_path / "results.md",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data", "lustre"], "must be NAME=FOLDER"),
        (["--data", "lustre=/nowhere"], "there is no folder /nowhere"),
        ([], "no tier is given with --data"),
        (["--size", "1"], "--size is '1'"),
    ],
)
def test_bench_storage_refuses_wrong_tier(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "storage", *words]) == 2
    assert message in capsys.readouterr().err


def test_save_minutes_use_one_unit() -> None:
    cell = Cell("a", "b", 1.0, 1.0, 64.0, 1.0)
    assert cell.save_minutes(int(2.3 * 2**40)) == pytest.approx(0.6586, abs=1e-3)
    assert "| a | b | 1 | 1 | 64 | 1 | 0.09 | 0.20 |" in markdown([cell])


def test_bench_storage_interrupted_removes_its_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("keepstep.preflight.storage_benchmark.os.fsync", interrupt)
    words = ["--data", f"a={tmp_path}", "--checkpoints", f"b={tmp_path}", "--size", "4MiB", "--writers", "2"]
    assert main(["bench", "storage", *words]) == 130
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", ["step", "storage"])
def test_bench_checks_output_file_before_measuring(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_: object) -> None:
        raise AssertionError("nothing is measured")

    monkeypatch.setattr("keepstep.preflight.storage_benchmark.measure", measure)
    monkeypatch.setattr("keepstep.train.bench.bench_step", measure)
    (tmp_path / "file").write_text("")
    tiers = ["--data", f"a={tmp_path}", "--checkpoints", f"b={tmp_path}"] if what == "storage" else []
    for out in (tmp_path / "file" / "out.json", tmp_path):
        assert main(["bench", what, *tiers, "--out", str(out)]) == 2
        assert capsys.readouterr().err.startswith(f"error: {out} cannot be written")
