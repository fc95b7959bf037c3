"""What no restart can heal ends a real run at once, with one error, one hint and its own exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.core.errors import EXIT_CONFIG, EXIT_DATA, EXIT_FAILED
from keepstep.resilience.fault_injection import Fault, to_environment

pytestmark = pytest.mark.slow
SETTINGS = [
    "data=synthetic",
    "model.seq_len=32",
    "global_batch=2",
    "microbatch=1",
    "max_duration=4ba",
    "compute.device=cpu",
    "compute.threads=1",
    "observe.tensorboard=false",
    "name=it",
    "checkpoint.interval=2ba",
    "evaluate.at_end=false",
]
MODEL = ["model.layers=1", "model.hidden=64", "model.heads=2", "model.vocab=512"]
MOST_LINES = 20


def train(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "keepstep", "train", *SETTINGS, f"runs_dir={root}", *words, "--procs", "2"]
    environment = {**os.environ, "AWS_EC2_METADATA_DISABLED": "true", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def check_ended_at_once(done: subprocess.CompletedProcess[str], code: int, message: str) -> None:
    output = (done.stdout + done.stderr).splitlines()
    assert done.returncode == code, done.stderr
    assert len(output) <= MOST_LINES
    assert "Traceback" not in done.stderr
    assert "restarting" not in done.stderr
    errors = [line for line in output if line.startswith("error:")]
    hints = [line for line in output if line.startswith(" hint:")]
    assert len(errors) == len(hints) == 1, output
    assert message in errors[0]


def test_missing_remote_data_ends_the_run(tmp_path: Path) -> None:
    done = train(tmp_path, *MODEL, "data.path=s3://no-such-bucket-of-keepstep/x")
    check_ended_at_once(done, EXIT_DATA, "s3://no-such-bucket-of-keepstep/x is missing or may not be read")


def test_start_from_without_weights_ends_the_run(tmp_path: Path) -> None:
    model = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "hidden_act": "silu",
    }  # fmt: skip
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "config.json").write_text(json.dumps(model))
    done = train(tmp_path, f"finetune.start_from={weights}")
    check_ended_at_once(done, EXIT_FAILED, "holds neither model.safetensors.index.json nor model.safetensors")


def test_missing_resume_from_ends_the_run(tmp_path: Path) -> None:
    done = train(tmp_path, *MODEL, f"checkpoint.resume_from={tmp_path}/elsewhere/step_00000007")
    check_ended_at_once(done, EXIT_CONFIG, "step_00000007, but that is not a committed step")


def test_damaged_checkpoints_end_the_run(tmp_path: Path) -> None:
    first = train(tmp_path, *MODEL)
    assert first.returncode == 0, first.stderr
    for file in (tmp_path / "it" / "checkpoints").glob("step_*/*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1000])
    done = train(tmp_path, *MODEL, "max_duration=6ba")
    check_ended_at_once(done, EXIT_FAILED, "can be loaded; the last problem")


def test_bug_is_reported_once_with_its_traceback_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in to_environment([Fault("exception", step=1, rank=1)], tmp_path).items():
        monkeypatch.setenv(name, value)
    done = train(tmp_path, *MODEL, "resilience.max_restarts=0")
    check_ended_at_once(done, EXIT_FAILED, "RuntimeError: injected fault: exception after step 1")
    assert "keepstep runs logs" in done.stderr
    logs = [path.read_text() for path in (tmp_path / "it" / "logs").glob("trainer-*.jsonl")]
    assert sum("injected fault: exception after step 1" in text for text in logs) == 1
    assert sum("Traceback" in text and "injected fault" in text for text in logs) == 1
