"""Checkpoints of other tools whose pickles would run code: nothing of it runs, whatever command reads them."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from keepstep.cli.main import main
from tests.interop.test_convert import LLAMA, megatron_weights, weights_of, write_legacy, write_torch_dist

pytestmark = pytest.mark.filterwarnings("ignore")
MARKER = "code-was-run"


class Call:
    """A pickle that calls a function when it is read."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


CALLS = {
    "a shell": Call(os.system, f"touch {MARKER}"),
    "a folder": Call(os.mkdir, MARKER),
    "eval": Call(eval, f"open({MARKER!r}, 'w')"),
    "a pickle inside": Call(pickle.loads, pickle.dumps(Call(os.mkdir, MARKER))),
    "a file": Call(io.open, MARKER, "w"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "source"


def _refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["ckpt", "convert", str(folder), "out", "--to", "safetensors"],
        ["ckpt", "convert", str(folder), "out"],
    ):
        assert main(words) != 0
        assert "Traceback" not in capsys.readouterr().err
        assert not Path(MARKER).exists()
    assert main(["import", str(folder), "--runs-dir", "runs"]) != 0
    assert not Path(MARKER).exists()


@pytest.mark.parametrize("what", CALLS)
def test_hostile_calls_would_run_without_care(what: str, folder: Path) -> None:
    """The attack itself works, so that its failure below proves something."""
    with io.BytesIO(pickle.dumps(CALLS[what])) as file:
        pickle.load(file)
    assert Path(MARKER).exists()


@pytest.mark.parametrize("what", CALLS)
def test_hostile_dcp_metadata_runs_nothing(what: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dcp_save({"model": {"a": torch.ones(4, 3)}}, checkpoint_id=str(folder), no_dist=True)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (folder / ".metadata").write_bytes(pickle.dumps(CALLS[what]))
    _refused(folder, capsys)
    metadata.planner_data = CALLS[what]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    _refused(folder, capsys)


@pytest.mark.parametrize("what", CALLS)
def test_hostile_dcp_tensor_runs_nothing(what: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dcp_save({"model": {"a": torch.ones(4, 3)}}, checkpoint_id=str(folder), no_dist=True)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (place,) = metadata.storage_data.values()
    content = io.BytesIO()
    torch.save(CALLS[what], content)
    place.offset, place.length = 0, len(content.getvalue())
    (folder / place.relative_path).write_bytes(content.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    _refused(folder, capsys)


def _torch_file(call: Call) -> bytes:
    content = io.BytesIO()
    torch.save({"args": call, "iteration": 7, "model": {}}, content)
    return content.getvalue()


def _stored_at(place: Any, call: Call, folder: Path) -> None:
    """Replace what DCP stores at a place of its data files."""
    content = io.BytesIO()
    torch.save(call, content)
    with (folder / place.relative_path).open("ab") as file:
        place.offset, place.length = file.tell(), len(content.getvalue())
        file.write(content.getvalue())


def _write_dcp(folder: Path) -> Path:
    dcp_save({"model": {"a": torch.ones(4, 3)}, "step": 7}, checkpoint_id=str(folder), no_dist=True)
    return folder


def _write_megatron(write: Callable[..., Any], folder: Path) -> Path:
    folder.mkdir()
    write(folder, LLAMA, megatron_weights(LLAMA, weights_of(LLAMA)))
    return folder / "iter_0000007"


FORMS: dict[str, Callable[[Path], Path]] = {
    "dcp": _write_dcp,
    "torch_dist": lambda folder: _write_megatron(write_torch_dist, folder),
    "legacy": lambda folder: _write_megatron(write_legacy, folder),
}


@pytest.mark.parametrize("form", FORMS)
def test_hostile_pickle_in_every_file_runs_nothing(form: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every file of the checkpoint, one after the other; each error names the file and says what to do."""
    inside = FORMS[form](folder)
    whole = {path: path.read_bytes() for path in inside.rglob("*") if path.is_file() and path.suffix != ".json"}
    assert len(whole) >= {"dcp": 2, "torch_dist": 3, "legacy": 1}[form]
    for victim in whole:
        for call in CALLS.values():
            if victim.name == ".metadata":
                victim.write_bytes(pickle.dumps(call))
            elif victim.suffix == ".distcp":
                metadata = pickle.loads(whole[inside / ".metadata"])
                tensors = {index: place for index, place in metadata.storage_data.items() if index.offset is not None}
                place = next(place for place in tensors.values() if place.relative_path == victim.name)
                _stored_at(place, call, inside)
                (inside / ".metadata").write_bytes(pickle.dumps(metadata))
            else:
                victim.write_bytes(_torch_file(call))
            assert main(["ckpt", "convert", str(folder), "out", "--to", "safetensors"]) == 1
            told = capsys.readouterr().err
            assert not Path(MARKER).exists()
            assert str(victim) in told
            assert " hint: " in told
            assert "hostile" in told
            assert "Traceback" not in told
            for path, content in whole.items():
                path.write_bytes(content)
