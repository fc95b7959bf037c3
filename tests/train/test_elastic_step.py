"""`reproducible: elastic`: the same bits at any number of processes."""

from __future__ import annotations

import math
import shutil
import sysconfig
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from keepstep.config.load import load_config
from keepstep.core.errors import ConfigError
from keepstep.train.elastic_step import LARGEST, FixedPointSums, noise_seed
from keepstep.train.step import StepSignals
from tests.train.tiny_runs import losses, metrics, run_here
from tests.train.tiny_worlds import run_world

NEEDS_COMPILER = pytest.mark.skipif(
    shutil.which("g++") is None or not Path(sysconfig.get_path("include"), "Python.h").is_file(),
    reason="compiled blocks on a CPU need g++ and Python's headers",
)
# Torch's compiler warns about itself.
COMPILER_WARNS = pytest.mark.filterwarnings("default")
EXACT = ["reproducible=elastic", "schedule.name=constant", "model.dropout=0.1", "finetune.neftune=5"]


@pytest.fixture
def alone() -> None:
    """A group of one, as a run of one process has."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def validations(root: Path, name: str) -> dict[int, float]:
    return {line["step"]: line["valid_loss"] for line in metrics(root, name) if "valid_loss" in line}


@pytest.mark.slow
def test_elastic_losses_are_equal_when_the_world_size_changes(tmp_path: Path) -> None:
    words = [*EXACT, "global_batch=10", "microbatch=2", "evaluate.interval=2ba"]
    run_here(tmp_path, *words, "name=steady", "max_duration=10ba")
    for stage, processes in enumerate((2, 1, 4, 3, 2), start=1):
        codes = run_world(tmp_path, processes, *words, "name=moving", f"max_duration={2 * stage}ba")
        assert codes == [0] * processes, (tmp_path / "said_0.txt").read_text()
        assert "resumed at step" in (tmp_path / "said_0.txt").read_text() or stage == 1
    assert losses(tmp_path, "moving") == losses(tmp_path, "steady")
    assert len(losses(tmp_path, "moving")) == 10
    assert validations(tmp_path, "moving") == validations(tmp_path, "steady")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "settings"),
    [
        (4, ["precision=fp32"]),
        (3, ["precision=bf16"]),
        # More processes than micro batches: one of them has nothing to compute.
        (3, ["optimizer=muon", "global_batch=4"]),
        (2, ["lora.rank=4", "lora.dropout=0.1", "lora.targets=[q, v]", "compute.recompute=full"]),
        pytest.param(2, ["compute.compile=true"], marks=[NEEDS_COMPILER, COMPILER_WARNS]),
    ],
)
def test_elastic_losses_are_equal_at_any_world_size(tmp_path: Path, processes: int, settings: list[str]) -> None:
    words = [*EXACT, *settings, "max_duration=4ba"]
    run_here(tmp_path, *words, "name=one")
    codes = run_world(tmp_path, processes, *words, "name=several")
    assert codes == [0] * processes, (tmp_path / "said_0.txt").read_text()
    one = [(line["loss"], line["grad_norm"]) for line in metrics(tmp_path, "one") if "loss" in line]
    assert one == [(line["loss"], line["grad_norm"]) for line in metrics(tmp_path, "several") if "loss" in line]
    assert validations(tmp_path, "one") == validations(tmp_path, "several")


@pytest.mark.slow
def test_elastic_steps_learn_what_usual_steps_do(tmp_path: Path) -> None:
    run_here(tmp_path, "name=usual")
    run_here(tmp_path, "name=exact", "reproducible=elastic")
    assert losses(tmp_path, "exact") == pytest.approx(losses(tmp_path, "usual"), abs=2e-5)


def test_fixed_point_sums_are_exact_down_to_eps(alone: None) -> None:
    weights = torch.nn.Parameter(torch.zeros(4))
    sums = FixedPointSums([weights], microbatches=2, device=torch.device("cpu"))
    values = torch.tensor([1e-8, -3.3e-5, 7.0, -1000.0])
    for number in range(2):
        torch.autograd.backward((weights * values).sum())
        assert weights.grad is None
        sums.add_loss(number, torch.tensor(0.5 + number))
    sums.reduce(StepSignals(stop=True, spent_s=0.25, void=True), dist.all_reduce)
    loss, overflow, told = sums.numbers()
    assert (float(loss), bool(overflow), told.tolist()) == (2.0, False, [1.0, 0.25, 1.0])
    (gradient,) = sums.gradients().values()
    assert torch.allclose(gradient, 2 * values, rtol=2**-23, atol=0.0)


@pytest.mark.parametrize("value", [LARGEST, math.inf, math.nan])
def test_fixed_point_sums_report_overflow(alone: None, value: float) -> None:
    weights = torch.nn.Parameter(torch.zeros(2))
    sums = FixedPointSums([weights], microbatches=2, device=torch.device("cpu"))
    torch.autograd.backward(weights[0] * value)
    sums.reduce(StepSignals(), dist.all_reduce)
    assert bool(sums.numbers()[1])
    sums.start()
    torch.autograd.backward(weights[0] * (LARGEST / 2))
    sums.reduce(StepSignals(), dist.all_reduce)
    assert not bool(sums.numbers()[1])


def test_noise_seed_depends_on_the_data_position() -> None:
    assert noise_seed(17, 64) == noise_seed(17, 64)
    assert len({noise_seed(seed, sample) for seed in (17, 18) for sample in (0, 8, 16)}) == 6


@pytest.mark.parametrize(
    "setting", ["parallel.tensor=2", "parallel.context=2", "parallel.offload=true", "precision=fp16"]
)
def test_settings_that_cannot_be_elastic_are_refused(setting: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["reproducible=elastic", setting])
    assert any("reproducible" in line for line in caught.value.lines())
    assert any(line.startswith(" hint") for line in caught.value.lines())
