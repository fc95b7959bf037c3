"""`keepstep ckpt` tells, checks, mends, tidies, converts and compares; foreign files cannot run code."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from keepstep.checkpoint import inspect
from keepstep.checkpoint.async_save.writer import Job, Publication, perform
from keepstep.checkpoint.checkpointer import Checkpointer
from keepstep.checkpoint.protocol import commit, retention
from keepstep.checkpoint.protocol.commit import Attempt, committed_steps
from keepstep.checkpoint.protocol.manifest import CommittedCheckpoint
from keepstep.checkpoint.storage.store import LocalStore, Store
from keepstep.cli.main import main
from keepstep.config.schema import CheckpointConfig
from keepstep.core.errors import CheckpointError
from keepstep.core.step_folders import MARKER
from keepstep.interop.dcp import read_dcp
from tests.checkpoint.support import example_state, same_tensors, write_step, zeroed


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run's folder with five committed steps and one that was never finished."""
    store = LocalStore(tmp_path / "run" / "checkpoints")
    for step in (10, 20, 30, 40, 50):
        write_step(store, step, example_state(step), ranks=2, with_parity=step == 50)
    (store.root / "step_00000060").mkdir()
    (store.root / "step_00000060" / "rank00000-0123.safetensors").write_bytes(b"half")
    return tmp_path / "run"


def answer(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    assert main(["ckpt", *words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_ls_names_committed_steps_newest_first_and_what_was_never_committed(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listing = answer(capsys, "ls", str(run_folder))
    assert [entry["step"] for entry in listing["steps"]] == [50, 40, 30, 20, 10]
    assert listing["uncommitted"] == ["step_00000060"]
    assert main(["ckpt", "ls", str(run_folder)]) == 0
    assert "step_00000060        not committed" in capsys.readouterr().out


def test_du_counts_every_file(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = answer(capsys, "du", str(run_folder))
    real = sum(path.stat().st_size for path in (run_folder / "checkpoints").glob("step*/*"))
    assert sizes["total_bytes"] == real


def test_show_tells_step_sections_and_values(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = answer(capsys, "show", str(run_folder), "--step", "20", "--tensors")
    assert shown["step"] == 20
    assert shown["sections"]["model"]["tensors"] == 4
    assert shown["values"]["progress"]["samples"] == 660
    assert shown["tensors"]["model.embed.weight"] == {"dtype": "F32", "shape": [300, 64]}


def test_numbers_that_json_does_not_know_are_null_in_answers(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {**example_state(60), "norms": [1.0, float("inf"), float("nan")]}
    write_step(LocalStore(run_folder / "checkpoints"), 60, state, ranks=1)
    assert main(["ckpt", "show", str(run_folder), "--json"]) == 0
    told = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert told["values"]["norms"] == [1.0, None, None]


def test_verify_finds_damage_repair_mends_it_with_parity_and_says_so_without(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ckpt", "verify", str(run_folder)]) == 0
    assert "every byte is as it was written" in capsys.readouterr().out
    for step in (40, 50):
        next((run_folder / "checkpoints" / f"step_{step:08d}").glob("rank00001*")).write_bytes(b"gone")
    found = answer(capsys, "verify", str(run_folder), code=1)
    assert [name for name, problems in found["steps"].items() if problems] == ["step_00000050", "step_00000040"]
    assert answer(capsys, "repair", str(run_folder))["rebuilt"][0].startswith("rank00001")
    answer(capsys, "verify", str(run_folder / "checkpoints" / "step_00000050"))
    assert main(["ckpt", "repair", str(run_folder), "--step", "40"]) == 1
    assert "without parity" in capsys.readouterr().err


def test_verify_names_the_repair_of_each_damaged_step(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = LocalStore(run_folder / "checkpoints")
    write_step(store, 70, example_state(70), ranks=2)
    next((store.root / "step_00000050").glob("rank00001*")).write_bytes(b"gone")
    assert main(["ckpt", "verify", str(run_folder)]) == 1
    (told,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("next: keepstep ")]
    assert main(told.removeprefix("next: keepstep ").split()) == 0
    capsys.readouterr()
    assert main(["ckpt", "verify", str(run_folder)]) == 0


def test_steps_that_a_run_removes_meanwhile_are_not_called_damaged(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(run_folder / "checkpoints")
    check = inspect.step_problems

    def check_while_training(place: Store, step: CommittedCheckpoint) -> list[str]:
        retention.apply(store, retention.Rules(keep=3), lambda _: None)
        return check(place, step)

    monkeypatch.setattr(inspect, "step_problems", check_while_training)
    answered = answer(capsys, "verify", str(run_folder))
    assert answered["steps"] == {"step_00000050": [], "step_00000040": [], "step_00000030": []}
    assert answered["removed_meanwhile"] == ["step_00000020", "step_00000010"]


def test_du_counts_on_while_a_run_removes_steps(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    look = LocalStore.size

    def size_while_training(store: LocalStore, name: str) -> int:
        retention.apply(store, retention.Rules(keep=3), lambda _: None)
        return look(store, name)

    monkeypatch.setattr(LocalStore, "size", size_while_training)
    assert answer(capsys, "du", str(run_folder))["steps"]["step_00000050"]["bytes"] > 0


def test_gc_shows_first_and_deletes_with_yes(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("gc", str(run_folder), "--keep", "2", "--keep-every", "20")
    assert answer(capsys, *words)["would_remove"] == ["step_00000010", "step_00000030", "step_00000060"]
    assert len(list((run_folder / "checkpoints").glob("step*"))) == 6
    assert answer(capsys, *words, "--yes")["removed"] == ["step_00000010", "step_00000030", "step_00000060"]
    assert [step.step for step in committed_steps(LocalStore(run_folder / "checkpoints"))] == [50, 40, 20]


def test_gc_leaves_a_save_alone_that_a_run_is_writing(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever makes room beside a run that saves must not cost it the save, its last one perhaps."""
    place = run_folder / "checkpoints"
    told: list[Any] = []

    def tidied_up_meanwhile(*words: Any) -> Any:
        told.append(answer(capsys, "gc", str(run_folder)))
        told.append(answer(capsys, "gc", str(run_folder), "--yes"))
        assert main(["ckpt", "ls", str(run_folder)]) == 0
        told.append(capsys.readouterr().out)
        return publish(*words)

    publish = commit.publish
    monkeypatch.setattr(commit, "publish", tidied_up_meanwhile)
    attempt = Attempt(70, 70, "step_00000070", "0a1b", 1, "xxh3_64")
    publication = Publication({}, {}, retention.Rules(keep=0), 0)
    report = perform(Job(str(place), attempt, 0, 0, [], {}, {}, publication), memoryview(b""), lambda: False)
    assert report["kind"] == "committed", report
    shown, done, listing = told
    assert "step_00000070" not in shown["would_remove"] + done["removed"]
    assert "step_00000060" in done["removed"], "nobody writes that one any more"
    assert "step_00000070 is being written and stays" in done["notes"]
    assert "step_00000070        being written" in listing
    assert not list(place.glob(f"*/{retention.WRITING}*"))


def test_gc_removes_what_a_writer_left_that_is_dead(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    store = LocalStore(run_folder / "checkpoints")
    with retention.writing(store, "step_00000060"):
        (note,) = (store.root / "step_00000060").glob(f"{retention.WRITING}*")
        told = json.loads(note.read_text())
        for changed, stays in (
            ({"pid": killed.pid}, False),
            ({"machine": "another one"}, True),
            ({"machine": "another one", "time": told["time"] - retention.WRITING_EXPIRES_S}, False),
        ):
            note.write_text(json.dumps({**told, **changed}))
            removes = answer(capsys, "gc", str(run_folder), "--keep", "5")["would_remove"]
            assert removes == ([] if stays else ["step_00000060"])


def test_the_best_step_stays_and_a_step_being_read_stays(run_folder: Path) -> None:
    store = LocalStore(run_folder / "checkpoints")
    notes: list[str] = []
    with retention.reading(store, "step_00000020"):
        # The loss in the examples falls with the step, so the best are the newest two.
        removed = retention.apply(store, retention.Rules(keep=1, keep_best=2), notes.append)
    assert removed == ["step_00000010", "step_00000030"]
    assert notes == ["step_00000020 is being read and stays until the next save"]


def test_a_killed_reader_protects_nothing(run_folder: Path) -> None:
    store = LocalStore(run_folder / "checkpoints")
    code = """if True:
        import os, signal, sys
        from pathlib import Path
        from keepstep.checkpoint.protocol import retention
        from keepstep.checkpoint.storage.store import LocalStore
        with retention.reading(LocalStore(Path(sys.argv[1])), "step_00000020"):
            os.kill(os.getpid(), signal.SIGKILL)
    """
    assert subprocess.run([sys.executable, "-c", code, str(store.root)], check=False).returncode == -signal.SIGKILL
    assert list((store.root / "step_00000020").glob("reading-*"))
    notes: list[str] = []
    assert "step_00000020" in retention.apply(store, retention.Rules(keep=1), notes.append)
    assert notes == []


def test_nothing_is_deleted_when_no_newer_step_is_whole(run_folder: Path) -> None:
    store = LocalStore(run_folder / "checkpoints")
    next((store.root / "step_00000050").glob("rank00000*")).unlink()
    notes: list[str] = []
    assert retention.apply(store, retention.Rules(keep=1), notes.append) == []
    assert "none of the newer ones is intact" in notes[0]


def test_diff_names_tensors_that_differ_and_only_those(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [str(run_folder / "checkpoints" / f"step_{step:08d}") for step in (10, 20)]
    found = answer(capsys, "diff", *steps, code=1)
    assert {difference["name"] for difference in found["differences"]} == {
        "model.embed.weight",
        "model.half",
        "optimizer.embed.weight.exp_avg",
        "rank.0.random",
    }
    assert answer(capsys, "diff", steps[0], steps[0])["differences"] == []


@pytest.mark.parametrize("form", ["sharded", "full", "dcp"])
def test_convert_there_and_back_keeps_every_bit(
    run_folder: Path, tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(run_folder / "checkpoints" / "step_00000020")
    written = answer(capsys, "convert", source, str(tmp_path / "there"), "--to", form, "--shards", "3")["written"]
    back = answer(capsys, "convert", written, str(tmp_path / "back"), "--to", "full", "--step", "20")["written"]
    assert answer(capsys, "diff", source, back)["differences"] == []
    into = zeroed(example_state(20))
    assert Checkpointer(tmp_path / "back", CheckpointConfig()).load_newest(into) is not None
    assert same_tensors(example_state(20), into)


def test_convert_to_safetensors_gives_the_weights_under_their_own_names(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file

    source = str(run_folder / "checkpoints" / "step_00000020")
    written = answer(capsys, "convert", source, str(tmp_path / "hf"), "--to", "safetensors")["written"]
    assert torch.equal(load_file(written)["embed.weight"], example_state(20)["model"]["embed.weight"])
    assert set(load_file(written)) == {"embed.weight", "half", "empty", "flag"}


@pytest.mark.filterwarnings("ignore")
def test_a_dcp_checkpoint_as_other_trainers_write_it_is_read(tmp_path: Path) -> None:
    state = {"state": {"model": {"w": torch.randn(5, 3).bfloat16()}, "step": 7, "names": ["a", "b"]}}
    dcp.save(state, checkpoint_id=str(tmp_path), no_dist=True)
    content = read_dcp(tmp_path)
    assert torch.equal(content.tensors["state.model.w"], state["state"]["model"]["w"])  # type: ignore[index]
    assert content.values["dcp"]["state.step"] == 7


class _Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch hostile-was-here",)


@pytest.mark.filterwarnings("ignore")
def test_a_hostile_dcp_metadata_file_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Hostile()))
    with pytest.raises(CheckpointError, match=r"posix\.system"):
        read_dcp(tmp_path)
    assert not (tmp_path / "hostile-was-here").exists()


@pytest.mark.filterwarnings("ignore")
def test_a_dcp_file_name_cannot_leave_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    dcp.save({"w": torch.ones(3)}, checkpoint_id=str(folder), no_dist=True)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../outside.distcp"
    (folder / "__0_0.distcp").rename(tmp_path / "outside.distcp")
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="plain file name"):
        read_dcp(folder)


def test_a_user_s_mistakes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "ls", str(tmp_path / "nowhere")]) == 1
    assert "does not exist" in capsys.readouterr().err
    assert main(["ckpt", "diff", "one"]) == 2
    assert "required: SECOND" in capsys.readouterr().err
    assert main(["ckpt", "convert", str(tmp_path), str(tmp_path / "x")]) == 2
    (tmp_path / "step_00000001").mkdir()
    assert main(["ckpt", "show", str(tmp_path / "step_00000001")]) == 1
    assert "not committed" in capsys.readouterr().err


def test_ckpt_actions_take_only_their_own_options(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "ls", str(run_folder), "--shards", "3", "--parity"]) == 2
    error = capsys.readouterr().err
    assert "unknown option --shards" in error
    assert "an option of keepstep ckpt convert" in error
    assert main(["ckpt", "verify", str(run_folder), "--yes"]) == 2
    assert main(["ckpt", "gc", str(run_folder), "--ye"]) == 2, "no abbreviations"


@pytest.mark.parametrize("action", ["ls", "du", "show", "verify", "repair", "gc"])
def test_a_step_that_is_not_there_is_told_and_not_made(
    action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "gone" / "checkpoints" / "step_00000010"
    assert main(["ckpt", action, str(place)]) == 1
    assert capsys.readouterr().err.startswith(f"error: {place} does not exist\n hint: keepstep ckpt ls {place.parent}")
    assert not (tmp_path / "gone").exists()


@pytest.mark.slow
def test_looking_at_checkpoints_needs_no_torch(run_folder: Path) -> None:
    script = (
        "import sys; from keepstep.cli.main import main; code = main(sys.argv[1:]); assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", script + "; sys.exit(code)"]
    for words in (["ls"], ["du"], ["show"], ["verify"]):
        subprocess.run([*command, "ckpt", *words, str(run_folder)], check=True, stdout=subprocess.DEVNULL)


def test_a_marker_from_another_step_is_not_believed(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = LocalStore(run_folder / "checkpoints")
    (store.root / "step_00000060" / MARKER).write_bytes((store.root / "step_00000050" / MARKER).read_bytes())
    assert "copied from another folder" in answer(capsys, "ls", str(run_folder))["damaged"][0]
