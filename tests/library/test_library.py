"""`import keepstep`: lazy names, and the docs, whose examples are run as an unguarded script and as a notebook."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import keepstep
from keepstep.core.errors import DataError, KeepstepError, UsageError
from keepstep.data.tokenization import train_bpe
from keepstep.library.data_stream import DataStream
from keepstep.observe.run_folder import read_last_step
from tests.doc_blocks import ROOT, blocks
from tests.patience import PATIENCE_S

SYNTHETIC: dict[str, Any] = {
    "model": {"layers": 1, "hidden": 32, "heads": 4, "vocab": 128, "seq_len": 16},
    "data": "synthetic",
    "global_batch": 8,
    "microbatch": 4,
    "observe": {"tensorboard": False},
    "compute": {"threads": 1, "device": "cpu"},
}


def python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S)


def test_import_loads_neither_torch_nor_numpy(tmp_path: Path) -> None:
    done = python(
        "import keepstep, sys; assert callable(keepstep.train) and set(keepstep.__all__) <= set(dir(keepstep)); "
        "print(sorted({'torch', 'numpy', 'yaml'} & set(sys.modules)))",
        tmp_path,
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_names_work_after_the_rooms_are_imported() -> None:
    import keepstep.data.loader
    import keepstep.train.clock

    assert callable(keepstep.train)
    assert callable(keepstep.data.open)
    assert not hasattr(keepstep, "trian")
    assert not hasattr(keepstep.data, "close")


def test_api_page_is_current() -> None:
    path = ROOT / "scripts" / "write_api_reference.py"
    spec = importlib.util.spec_from_file_location("write_api_reference", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "api.md").read_text() == module.page(), "run: python scripts/write_api_reference.py"


# ------------------------------------------------------------------------------------------------------------- data


def test_stream_resumes_exactly_for_any_number_of_ranks(tmp_path: Path) -> None:
    def opened(**named: Any) -> DataStream:
        return keepstep.data.open(None, SYNTHETIC, runs_dir=str(tmp_path), **named)

    whole = opened()
    next(whole)
    state = json.loads(json.dumps(whole.state_dict()))
    expected = next(whole).inputs
    parts = [opened(rank=rank, ranks=3) for rank in range(3)]
    for part in parts:
        part.load_state_dict(state)
    assert np.array_equal(np.concatenate([next(part).inputs for part in parts]), expected)
    assert all(part.state_dict() == whole.state_dict() for part in parts)


def test_stream_refuses_the_state_of_another_order(tmp_path: Path) -> None:
    stream = keepstep.data.open(None, SYNTHETIC, runs_dir=str(tmp_path))
    state = stream.state_dict()
    state["order"] = {**state["order"], "rows": 3}
    with pytest.raises(DataError, match="rows 3 then"):
        stream.load_state_dict(state)


def test_stream_refuses_ranks_that_get_no_rows(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="rank is 2"):
        keepstep.data.open(None, SYNTHETIC, runs_dir=str(tmp_path), rank=2, ranks=2)
    with pytest.raises(UsageError, match="ranks at most batch"):
        keepstep.data.open(None, SYNTHETIC, runs_dir=str(tmp_path), batch=1, ranks=2)


def test_stream_of_validation_rows_is_one_pass(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"line {number} of the text\n" for number in range(400)))
    train_bpe(["line of the text 0123456789"] * 50, 300, tmp_path / "tokenizer.json")
    path = str(tmp_path / "text.txt")
    data = {"path": path, "valid_path": path, "tokenizer": str(tmp_path / "tokenizer.json")}
    config = {**SYNTHETIC, "data": data}
    config["model"] = {**SYNTHETIC["model"], "vocab": 300}
    stream = keepstep.data.open(None, config, runs_dir=str(tmp_path), split="valid", batch=7)
    assert sum(len(batch.inputs) for batch in stream) == stream.samples_per_epoch


# ------------------------------------------------------------------------------------------------------------- runs


def test_run_and_load_say_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run"):
        keepstep.Run(tmp_path / "absent")
    (tmp_path / "step_00000005").mkdir()
    with pytest.raises(KeepstepError, match="not committed"):
        keepstep.load(tmp_path / "step_00000005")
    with pytest.raises(KeepstepError, match="no tokenizer"):
        keepstep.load(tmp_path)
    with pytest.raises(UsageError, match="there is no"):
        keepstep.load(tmp_path / "nowhere")


def test_train_reports_a_config_error_before_it_starts(tmp_path: Path) -> None:
    with pytest.raises(KeepstepError, match=r"unknown key optimizer\.lrr"):
        keepstep.train(None, SYNTHETIC, runs_dir=str(tmp_path / "runs"), optimizer={"lrr": 1})
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_train_raises_the_error_of_the_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--procs") as error:
        keepstep.train(None, SYNTHETIC, runs_dir=str(tmp_path), processes="many", quiet=True)
    assert error.value.exit_code == 2
    assert error.value.hint


@pytest.mark.slow
def test_train_stops_and_saves_when_a_callback_fails(tmp_path: Path) -> None:
    class Fails(keepstep.Callback):
        def on_step(self, step: int, metrics: Any) -> None:
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        keepstep.train(
            None, SYNTHETIC, runs_dir=str(tmp_path), max_duration="100000ba", callbacks=[Fails()], quiet=True
        )
    run = keepstep.Run(tmp_path / "run")
    assert run.status.state == "stopped"
    assert run.checkpoints[-1].step == run.status.step


@pytest.mark.slow
def test_run_stops_and_saves_when_its_caller_is_killed(tmp_path: Path) -> None:
    code = f"""
import os, signal, keepstep
class Kill(keepstep.Callback):
    def on_step(self, step, metrics):
        os.kill(os.getpid(), signal.SIGKILL)
keepstep.train(None, {SYNTHETIC!r}, runs_dir="runs", max_duration="100000ba", callbacks=[Kill()])
"""
    assert python(code, tmp_path).returncode == -signal.SIGKILL
    # Waits for the run's folder until the processes of the killed caller have saved.
    run = keepstep.train(None, SYNTHETIC, runs_dir=str(tmp_path / "runs"), max_duration="1ba", quiet=True)
    assert [event["kind"] for event in run.events].count("stop") == 1


# ------------------------------------------------------------------------------------------------------------- docs


@pytest.mark.slow
def test_library_page_examples_run_as_an_unguarded_script(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(blocks("docs/library.md", "yaml")[0])
    script = 'print("the script starts")\n' + "\n".join(blocks("docs/library.md", "python")) + '\nprint("the end")\n'
    (tmp_path / "example.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    # Once: no process of the run has imported the script.
    assert (done.stdout + done.stderr).count("the script starts") == 1
    assert done.stdout.endswith("the end\n")
    assert "hint: keepstep calls it optimizer.lr" in done.stdout
    assert "step 12 is on disk" in done.stdout
    assert (tmp_path / "watched.html").stat().st_size > 1000


def notebook_client(cells: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("ipykernel")
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    # The kernel of this Python, whatever kernels the user has installed, and nothing in the user's folders.
    spec = folder / "jupyter" / "kernels" / "this"
    spec.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "this", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(folder / "jupyter"))
    for name in ("JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(folder / name.lower()))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    resources = {"metadata": {"path": str(folder)}}
    return nbclient.NotebookClient(notebook, timeout=int(PATIENCE_S), kernel_name="this", resources=resources)


def notebook_cells() -> list[str]:
    notebook = json.loads((ROOT / "docs" / "first-run.ipynb").read_text())
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_first_run_notebook_trains_resumes_plots_and_generates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = notebook_client(notebook_cells(), tmp_path, monkeypatch)
    client.execute()
    outputs = [output for cell in client.nb.cells for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    run = keepstep.Run(tmp_path / "runs" / "counting")
    assert run.status.state == "finished"
    assert np.array_equal(run.metrics["step"], np.arange(1, 41))
    # Interrupted once, and resumed once.
    assert [event["kind"] for event in run.events if event["kind"] in ("stop", "resume", "finish")] == [
        "stop", "resume", "finish",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_notebook_interrupt_saves_and_the_next_call_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = f"keepstep.train(None, {SYNTHETIC!r}, runs_dir='runs', schedule={{'name': 'constant'}}, max_duration="
    cells = [
        "import keepstep",
        f"try:\n    {train}'1000000ba')\nexcept KeyboardInterrupt:\n    saved = keepstep.Run('runs/run').status.step",
        f"run = {train}f'{{saved + 3}}ba')\nassert run.status.step == saved + 3, (run, saved)",
    ]
    client = notebook_client(cells, tmp_path, monkeypatch)
    metrics, over = tmp_path / "runs" / "run" / "metrics.jsonl", threading.Event()

    def interrupt() -> None:
        while read_last_step(metrics) < 3:
            if over.wait(0.1):
                return
        # What the stop button does: a signal to all processes of the kernel's group.
        os.killpg(client.km.provisioner.pgid, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        client.execute()
    finally:
        over.set()
        thread.join()
    kinds = [event["kind"] for event in keepstep.Run(tmp_path / "runs" / "run").events]
    assert kinds.count("stop") == kinds.count("resume") == kinds.count("finish") == 1
