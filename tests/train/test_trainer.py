"""Whole runs, small: the promises a user relies on."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from keepstep.config.load import load_config
from keepstep.core.errors import ConfigError, KeepstepError
from keepstep.data.formats.mds_writer import TokenShardWriter, write_index
from keepstep.data.formats.megatron import MegatronWriter, token_dtype
from keepstep.observe.sinks.trackers import FOUNDRY_TAGS, MEGATRON_TAGS
from keepstep.resilience.fault_injection import Fault, to_environment
from tests.patience import PATIENCE_S
from tests.train.tiny_runs import TINY, BackgroundRun, losses, metrics, run_here, run_processes

pytestmark = pytest.mark.slow


def test_same_run_twice_has_bitwise_equal_losses(tmp_path: Path) -> None:
    run_here(tmp_path, "name=a")
    run_here(tmp_path, "name=b")
    assert losses(tmp_path, "a") == losses(tmp_path, "b")
    assert len(losses(tmp_path, "a")) == 6


def test_loss_falls_and_depends_on_the_seed(tmp_path: Path) -> None:
    run_here(tmp_path, "name=a", "max_duration=30ba")
    run_here(tmp_path, "name=b", "seed=18")
    fallen = losses(tmp_path, "a")
    assert fallen[-1] < fallen[0] - 0.5
    assert losses(tmp_path, "b")[0] != fallen[0]


@pytest.mark.parametrize("model", ["mpt-tiny", "gpt3-125m", "llama-1b"])
def test_one_and_two_processes_agree(tmp_path: Path, model: str) -> None:
    run_here(tmp_path, f"model={model}", "name=one", "max_duration=20ba")
    done = run_processes(tmp_path, 2, f"model={model}", "name=two", "max_duration=20ba")
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path, "two") == pytest.approx(losses(tmp_path, "one"), abs=1e-4)
    valid = [
        [line["valid_loss"] for line in metrics(tmp_path, name) if "valid_loss" in line] for name in ("one", "two")
    ]
    assert valid[0] == pytest.approx(valid[1], abs=1e-4)


def test_stopped_run_resumes_with_bitwise_equal_losses(tmp_path: Path) -> None:
    run_here(tmp_path, "name=whole", "max_duration=12ba", "model.dropout=0.1")
    # checkpoint.interval stands in for a stop: the second call resumes in the middle of the schedule.
    words = ["name=cut", "model.dropout=0.1", "schedule.name=cosine"]
    run_here(tmp_path, *words, "max_duration=12ba", "checkpoint.interval=5ba", "checkpoint.at_end=false")
    resumed = [line for line in metrics(tmp_path, "cut") if "loss" in line]
    run_here(tmp_path, *words, "max_duration=12ba", "checkpoint.interval=5ba")
    again = [line for line in metrics(tmp_path, "cut") if "loss" in line][len(resumed) :]
    assert [line["step"] for line in again] == [11, 12], "step 10 was the newest checkpoint"
    assert losses(tmp_path, "cut") == losses(tmp_path, "whole")


def test_resume_reports_a_changed_data_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("web", "code"):
        with MegatronWriter(tmp_path / name, token_dtype(128)) as writer:
            for _ in range(4):
                writer.add(np.arange(500) % 128)

    def blended(web: int, code: int) -> str:
        return f"data.blend={{{tmp_path / 'web'}: {web}, {tmp_path / 'code'}: {code}}}"

    for number, (weights, is_other) in enumerate([((7, 3), False), ((7, 3), False), ((1, 1), True)], start=1):
        run_here(tmp_path, blended(*weights), "data.path=", f"max_duration={2 * number}ba")
        said = capsys.readouterr().err
        assert ("weights [7, 3] then, [1, 1] now" in said) == is_other


def test_wait_for_data_is_no_hang(tmp_path: Path) -> None:
    """One of two processes waits for its data longer than a step may take, the other for it."""
    writer = TokenShardWriter(tmp_path / "far", "shard", np.dtype(np.int32))
    for _ in range(40):
        writer.add_rows(np.arange(256).reshape(16, 16) % 128)
        writer.flush()
    write_index(tmp_path / "far", writer.entries)
    asked = itertools.count(1)

    class Slow(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Stay quiet."""

        def do_GET(self) -> None:
            if self.path.endswith(".mds") and next(asked) == 20:
                time.sleep(20)
            super().do_GET()

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Slow, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        words = [f"data=http://127.0.0.1:{server.server_address[1]}/far", "data.valid_share=0.0", "data.prefetch=1"]
        words += ["data.shuffle_window=16", "resilience.hang_s=12", "max_duration=60ba"]
        done = run_processes(tmp_path, 2, *words)
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 0, done.stderr
    assert next(asked) > 20
    assert "fault" not in done.stderr


def test_sigterm_saves_exits_75_and_resumes(tmp_path: Path) -> None:
    words = [*TINY, f"runs_dir={tmp_path}", "max_duration=4000ba", "name=stopped", "--procs", "2"]
    command = [sys.executable, "-m", "keepstep", "train", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    events, seen = tmp_path / "stopped" / "metrics.jsonl", 0
    deadline = time.monotonic() + PATIENCE_S
    while seen < 3 and time.monotonic() < deadline:
        seen = len(events.read_text().splitlines()) if events.exists() else 0
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 75, errors
    assert "start the same command to resume" in errors
    last = max(line["step"] for line in metrics(tmp_path, "stopped") if "loss" in line)
    done = run_processes(tmp_path, 1, "name=stopped", f"max_duration={last + 3}ba")
    assert done.returncode == 0, done.stderr
    assert f"resumed at step {last}" in done.stderr
    assert len(losses(tmp_path, "stopped")) == last + 3


def test_restart_waits_for_the_last_save_of_orphaned_workers(tmp_path: Path) -> None:
    words = [*TINY, f"runs_dir={tmp_path}", "max_duration=100000ba", "checkpoint.interval=100000ba", "--procs", "1"]
    command = [sys.executable, "-m", "keepstep", "train", *words]
    # Its only save, the one on request, takes longer than the next launcher needs to come up.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "KEEPSTEP_FAILPOINT": "before_data:sleep=12"}
    killed = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    written, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and not (written.exists() and written.read_text().count("\n") > 3):
        time.sleep(0.05)
    killed.kill()
    killed.wait()
    again = run_processes(tmp_path, 1, "max_duration=1ba", "checkpoint.interval=100000ba")
    assert again.returncode == 0, again.stderr
    reached = max(line["step"] for line in metrics(tmp_path) if "loss" in line)
    assert f"resumed at step {reached}" in again.stderr
    steps = [line["step"] for line in metrics(tmp_path) if "loss" in line]
    assert steps == list(range(1, reached + 1)), "no step was done twice"


@pytest.mark.parametrize(
    "setting",
    ["compute.recompute=selective", "compute.recompute=full", "compute.loss_chunks=4", "microbatch=4",
     "parallel.keep_gathered=true"],
)  # fmt: skip
def test_compute_settings_do_not_change_a_step(tmp_path: Path, setting: str) -> None:
    run_here(tmp_path, "name=plain", "model=llama-1b")
    run_here(tmp_path, "name=other", "model=llama-1b", setting)
    assert losses(tmp_path, "other") == pytest.approx(losses(tmp_path, "plain"), abs=2e-5)


@pytest.mark.parametrize("setting", ["precision=bf16", "precision=fp16", "optimizer=muon", "model.linear=bitnet"])
def test_other_numbers_and_optimizers_learn_too(tmp_path: Path, setting: str) -> None:
    run_here(tmp_path, setting, "max_duration=30ba", "optimizer.muon_lr=0.02")
    fallen = losses(tmp_path)
    assert fallen[-1] < fallen[0] - 0.3


def test_hybrid_sharding_agrees_with_one_process(tmp_path: Path) -> None:
    run_here(tmp_path, "name=one")
    done = run_processes(tmp_path, 2, "name=two", "parallel.replicate=2")
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path, "two") == pytest.approx(losses(tmp_path, "one"), abs=1e-4)


def test_run_saved_by_two_processes_resumes_with_one(tmp_path: Path) -> None:
    run_here(tmp_path, "name=whole", "max_duration=8ba")
    # Two processes train the first half of the very same schedule, one process the rest.
    two = run_processes(
        tmp_path, 2, "name=moved", "max_duration=8ba", "checkpoint.interval=5ba", "checkpoint.at_end=false"
    )
    assert two.returncode == 0, two.stderr
    run_here(tmp_path, "name=moved", "max_duration=8ba")
    assert losses(tmp_path, "moved") == pytest.approx(losses(tmp_path, "whole"), abs=1e-4)


def test_the_profiler_writes_its_traces(tmp_path: Path) -> None:
    run_here(tmp_path, "profile.active=2", "profile.skip_first=1", "profile.wait=1", "profile.warmup=1")
    traces = list((tmp_path / "run" / "profile").glob("trace_*.json"))
    assert len(traces) == 1
    names = {event.get("name") for event in json.loads(traces[0].read_text())["traceEvents"]}
    assert "aten::mm" in names


def test_profiler_names_traces_after_run_steps(tmp_path: Path) -> None:
    words = ["profile.active=1", "profile.skip_first=0", "profile.wait=0", "profile.warmup=1"]
    for stop in (3, 6):
        run_here(tmp_path, *words, f"max_duration={stop}ba")
    traces = sorted(path.name for path in (tmp_path / "run" / "profile").glob("trace_*.json"))
    assert traces == ["trace_step2_rank0.json", "trace_step5_rank0.json"]


def test_run_folder_is_complete(tmp_path: Path) -> None:
    run_here(tmp_path, "checkpoint.interval=4ba", "observe.tensorboard=true")
    folder = tmp_path / "run"
    assert load_config(folder / "config.yaml").config.max_duration.value == 6
    kinds = [json.loads(line)["kind"] for line in (folder / "events.jsonl").read_text().splitlines()]
    assert kinds[0] == "start"
    assert kinds[-1] == "finish"
    assert kinds.count("checkpoint_committed") == 2
    assert json.loads((folder / "facts.json").read_text())["total_steps"] == 6
    assert list((folder / "tensorboard").glob("events.*"))
    first = metrics(tmp_path)[0]
    assert {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "step_s", "memory_gib"} <= set(first)
    assert "mfu" not in first, "nobody knows the peak of a CPU"


def test_run_fills_every_documented_tensorboard_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setattr("keepstep.train.telemetry.run_record.known_peak_flops", lambda *_: 1e12)
    run_here(tmp_path, "precision=fp16", "observe.tensorboard=true")
    read = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    read.Reload()
    assert {*FOUNDRY_TAGS.values(), *MEGATRON_TAGS.values()} <= set(read.Tags()["scalars"])
    assert [scalar.value for scalar in read.Scalars("batch-size")] == [8.0] * 6
    assert [scalar.value for scalar in read.Scalars("world-size")] == [1.0] * 6
    assert all(scalar.value >= 2 for scalar in read.Scalars("loss-scale"))


def test_metrics_have_source_positions_after_resume(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with MegatronWriter(tmp_path / name, token_dtype(128)) as writer:
            writer.add(np.arange(16 * 20 + 1) % 128)
    first, second = str(tmp_path / "a"), str(tmp_path / "b")
    blend = ["data=null", f"data.blend={{{first}: 3, {second}: 1}}", "data.valid_share=0", "checkpoint.interval=3ba"]
    for duration in ("3ba", "6ba"):
        run_here(tmp_path, *blend, f"max_duration={duration}")
    positions = [line["sources"] for line in metrics(tmp_path) if "loss" in line]
    assert [each[first]["samples"] for each in positions] == [6 * step for step in range(1, 7)]
    assert positions[-1] == {first: {"samples": 36, "epoch": 1.8}, second: {"samples": 12, "epoch": 0.6}}


def test_weights_of_another_run_start_a_fresh_schedule(tmp_path: Path) -> None:
    run_here(tmp_path, "name=first")
    step_folder = next((tmp_path / "first" / "checkpoints").glob("step_*"))
    run_here(tmp_path, "name=second", f"checkpoint.resume_from={step_folder}", "checkpoint.skip_optimizer=true")
    again = losses(tmp_path, "second")
    assert len(again) == 6
    assert again[0] < losses(tmp_path, "first")[0]


def test_nan_loss_ends_the_run_and_saves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeepstepError, match="the loss is"):
        run_here(tmp_path, "optimizer.lr=1e30", "optimizer.clip=0", "checkpoint.interval=1ba", "max_duration=50ba")
    saved = sorted((tmp_path / "run" / "checkpoints").glob("step_*"))
    assert len(saved) < 50


def test_batch_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        run_here(tmp_path, "global_batch=9", "microbatch=2")
    assert any("hint" in line for line in caught.value.lines())
    refused = run_processes(tmp_path, 3, "global_batch=8", "microbatch=2")
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr


def test_short_grace_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    """A save that cannot end in time is not begun: what is on disk stays the newest, whole."""
    fault, marks = Fault("terminate", 7), tmp_path / "marks"
    marks.mkdir()
    words = [*TINY, f"runs_dir={tmp_path}", "name=short", "max_duration=12ba", "checkpoint.interval=4ba"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **to_environment([fault], marks)}
    command = [sys.executable, "-m", "keepstep", "train", *words, "resilience.grace_s=1e-6", "--procs", "2"]
    stopped = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert stopped.returncode == 75, stopped.stderr
    # The request takes its way over the launcher: some steps pass meanwhile.
    assert re.search(r"the checkpoint of step (4|8) stands and \d steps will be done again", stopped.stderr)
    assert subprocess.run(command, env=environment, timeout=PATIENCE_S).returncode == 0
    run_processes(tmp_path, 2, "name=whole", "max_duration=12ba", "checkpoint.interval=4ba")
    assert losses(tmp_path, "short") == losses(tmp_path, "whole")


def test_a_stop_request_ends_a_validation_too(tmp_path: Path) -> None:
    """A validation of ten thousand batches must not outlast what a scheduler grants."""
    words = ["max_duration=8ba", "evaluate.interval=2ba", "evaluate.batches=100000"]
    run = BackgroundRun(tmp_path, 2, *words, output=tmp_path / "output.txt")
    # The numbers of a step are written before its validation.
    run.wait_until(lambda: (tmp_path / "run" / "metrics.jsonl").exists() and len(losses(tmp_path)) == 2)
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 75, run.output
    assert "validation is left for the next start" in run.output
