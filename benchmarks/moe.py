"""Mixtures of experts on one GPU compared with a torchtitan-style layer; writes benchmarks/results/moe.json.

    PYTHONPATH=src python -W ignore benchmarks/moe.py kernels layer steps fp8

Parts, of at most about two minutes each on an H200; a part keeps the results of the others:
- `kernels`: each matmul of the three layers next to torch's grouped matmul alone, in TFLOP/s, and how far they differ.
- `layer`: forward and backward of one layer of three shapes next to the compiled reference of this file, which has the
  same weights. They take turns, and medians count, because a GPU gets slower as it heats up.
- `steps`: whole training steps of an eight-layer Qwen3-MoE and of OLMoE-1B-7B with its whole training state.
- `fp8`: steps of an eight-layer OLMoE and of a three-layer Mixtral in bf16 and in fp8, and the loss of OLMoE in both
  after real steps.

`--tiny` runs everything in seconds on a CPU, to see that it runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from keepstep.config.load import load_config
from keepstep.config.schema import ExpertsConfig, ModelConfig, RunConfig
from keepstep.core.errors import KeepstepError
from keepstep.core.files import write_json
from keepstep.models.kernels import grouped_gemm
from keepstep.models.moe import MoE
from keepstep.models.ops import expert_matmuls, expert_rows, experts_fp8
from keepstep.models.ops.routed_experts import sort_by_expert
from keepstep.models.size import peak_flops
from keepstep.train.bench import bench_step
from keepstep.train.trainer import train

RESULTS = Path(__file__).parent / "results" / "moe.json"
PARTS = ("kernels", "layer", "steps", "fp8")
KEYS = (
    "layer_ratio_olmoe", "layer_ratio_qwen3", "layer_ratio_mixtral", "qwen3_8layer_tokens_per_s", "olmoe_mfu",
    "fp8_over_bf16", "fp8_over_bf16_mixtral", "fp8_loss_difference",
)  # fmt: skip
TINY = (
    "model.layers=2", "model.hidden=64", "model.heads=4", "model.kv_heads=4", "model.head_dim=16", "model.vocab=512",
    "model.seq_len=64", "model.experts.count=8", "model.experts.top_k=2", "model.experts.ffn_hidden=32",
    "compute.device=cpu", "compute.compile=false",
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """One layer and how many tokens it gets."""

    experts: int
    top_k: int
    width: int
    tokens: int
    hidden: int = 2048

    @property
    def flops(self) -> int:
        """Of forward and backward, by the experts that tokens use."""
        return 6 * 3 * self.tokens * self.top_k * self.hidden * self.width


SHAPES = {
    "olmoe": Shape(64, 8, 1024, 32768),
    "qwen3": Shape(128, 8, 768, 32768),
    "mixtral": Shape(8, 2, 14336, 16384, hidden=4096),
}
TINY_SHAPES = {"olmoe": Shape(8, 2, 32, 64, hidden=64), "mixtral": Shape(4, 2, 48, 32, hidden=32)}


class TitanStyleMoE(nn.Module):
    """Written from torchtitan's published design: sort by expert, three grouped matmuls, scores after the experts."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        experts, width, hidden = shape.experts, shape.width, shape.hidden
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.w1, self.w3 = (nn.Parameter(torch.randn(experts, width, hidden) * 0.02) for _ in range(2))
        self.w2 = nn.Parameter(torch.randn(experts, hidden, width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        count, k = self.shape.experts, self.shape.top_k
        scores, chosen = torch.topk(F.softmax(self.gate(x).float(), dim=1), k, dim=1)
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        key = chosen.view(-1)
        tokens = torch.histc(key if x.is_cuda else key.float(), bins=count, min=0, max=count)
        ends = tokens.cumsum(0).to(torch.int32)
        order = torch.argsort(key, stable=True)
        sorted_x = x[order // k]
        gate, up = (torch._grouped_mm(sorted_x, w.transpose(-2, -1), offs=ends) for w in (self.w1, self.w3))
        out = torch._grouped_mm(F.silu(gate) * up, self.w2.transpose(-2, -1), offs=ends)
        restored = torch.zeros_like(out)
        restored[order] = out
        weighted = torch.bmm(scores.view(-1, 1, k), restored.view(-1, k, x.shape[1]).float())
        return weighted.to(x.dtype).squeeze(1)


def own_layer(shape: Shape, reference: TitanStyleMoE) -> MoE:
    """Our layer with the reference's weights."""
    experts = ExpertsConfig(count=shape.experts, top_k=shape.top_k, ffn_hidden=shape.width)
    config = ModelConfig(
        hidden=shape.hidden, heads=shape.hidden // 16, activation="swiglu", bias=False, experts=experts
    )
    layer = MoE(config)
    with torch.no_grad():
        layer.router.weight.copy_(reference.gate.weight)
        layer.experts.gate_up.copy_(torch.cat([reference.w1, reference.w3], dim=1))
        layer.experts.down.copy_(reference.w2)
    return layer


class Clock:
    """Seconds of calls: device events on a GPU, the host's clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"

    def seconds(self, calls: int, call: Callable[[], Any]) -> list[float]:
        if not self._is_cuda:
            return [self._host_seconds(call) for _ in range(calls)]
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
        marks[0].record()
        for mark in marks[1:]:
            call()
            mark.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1000 for a, b in pairwise(marks)]

    def _host_seconds(self, call: Callable[[], Any]) -> float:
        started = time.perf_counter()
        call()
        return time.perf_counter() - started


def fresh() -> None:
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def saved_bytes(layer: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """What a forward pass keeps for the backward pass, its input and output not counted; 0 on a CPU."""
    if not x.is_cuda:
        return 0
    before = torch.cuda.memory_allocated()
    out = layer(x)
    return torch.cuda.memory_allocated() - before - out.nbytes


def compare_layers(shape: Shape, device: torch.device, rounds: int, calls: int, compiles: bool) -> dict[str, Any]:
    """Median times of both layers, which take turns."""
    fresh()
    torch.manual_seed(0)
    with torch.device(device):
        plain = TitanStyleMoE(shape)
        ours = own_layer(shape, plain)
        x, gradient = torch.randn(shape.tokens, shape.hidden), torch.randn(shape.tokens, shape.hidden)
    plain, ours = plain.to(torch.bfloat16), ours.to(torch.bfloat16)
    x, gradient = x.to(torch.bfloat16).requires_grad_(), gradient.to(torch.bfloat16)
    reference = torch.compile(plain, dynamic=False) if compiles else plain
    calls_of: dict[str, Callable[[Tensor], Tensor]] = {"reference": reference, "ours": lambda x: ours(x[None])[0]}

    def once(name: str) -> Tensor:
        x.grad = None
        for parameter in (*plain.parameters(), *ours.parameters()):
            parameter.grad = None
        out = calls_of[name](x)
        out.backward(gradient)
        return out.detach()

    outputs = {name: (once(name), x.grad.clone()) for name in calls_of}
    pairs = zip(outputs["ours"], outputs["reference"], strict=True)
    differences = [((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in pairs]
    del outputs
    clock, seconds = Clock(device), {name: [] for name in calls_of}
    for name in calls_of:
        clock.seconds(2, lambda name=name: once(name))
    for _ in range(rounds):
        for name in calls_of:
            seconds[name] += clock.seconds(calls, lambda name=name: once(name))
    medians = {name: statistics.median(of) for name, of in seconds.items()}
    peak = peak_flops(torch.cuda.get_device_name(), "bf16") if device.type == "cuda" else None
    return {
        "shape": asdict(shape),
        "reference_s": medians["reference"],
        "ours_s": medians["ours"],
        "ratio": medians["reference"] / medians["ours"],
        "mfu": {name: shape.flops / of / peak for name, of in medians.items()} if peak else {},
        "output_and_gradient_difference": differences,
        "saved_bytes": {name: saved_bytes(call, x) for name, call in calls_of.items()},
        "kernels_s": kernel_seconds(lambda: once("ours"), device),
        "reference_kernels_s": kernel_seconds(lambda: once("reference"), device),
    }


def kernel_seconds(call: Callable[[], Any], device: torch.device, most: int = 16) -> dict[str, float]:
    """Device seconds of one call by kernel, the longest first; empty on a CPU."""
    if device.type != "cuda":
        return {}
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    return {event.key[:100]: event.self_device_time_total / 1e6 for event in events[:most]}


@dataclass(frozen=True)
class Rows:
    """Random inputs of a layer's matmuls, and where each expert's rows end, uneven as a fresh router makes them."""

    x: Tensor
    d_out: Tensor
    gate_up: Tensor
    activation: Tensor
    weight: Tensor
    gate_up_weights: Tensor
    down: Tensor
    ends: Tensor
    tokens: Tensor


def random_rows(shape: Shape, device: torch.device) -> Rows:
    torch.manual_seed(0)
    rows, width, hidden, experts = shape.tokens * shape.top_k, shape.width, shape.hidden, shape.experts

    def draw(*sizes: int, scale: float = 1.0) -> Tensor:
        return torch.randn(sizes, device=device, dtype=torch.bfloat16) * scale

    scores = torch.randn(shape.tokens, experts, device=device) + 0.3 * torch.randn(experts, device=device)
    chosen = scores.topk(shape.top_k).indices
    routes = sort_by_expert(chosen, chosen.flatten().bincount(minlength=experts))
    weights = draw(experts, 2 * width, hidden, scale=hidden**-0.5), draw(experts, hidden, width, scale=width**-0.5)
    parts = draw(rows, hidden), draw(rows, hidden), draw(rows, 2 * width), draw(rows, width)
    weight = torch.rand(rows, device=device)
    return Rows(*parts, weight, *weights, routes.ends_e, routes.order_m // shape.top_k)


def matmuls(rows: Rows) -> dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor], int]]:
    """Of each matmul: ours, torch's without what is fused into ours, and the numbers that a row is multiplied by."""
    ours, r = expert_matmuls, rows

    def torchs(left: Tensor, right: Tensor) -> Tensor:
        return torch._grouped_mm(left, right, offs=r.ends)

    (_, n, d), f = r.gate_up_weights.shape, r.down.shape[2]
    return {
        "gate_up + SwiGLU": (
            lambda: ours.expert_gate_up(r.x, r.gate_up_weights, r.weight, r.ends)[0],
            lambda: torchs(r.x, r.gate_up_weights.transpose(1, 2)),
            n * d,
        ),
        "down": (
            lambda: ours.expert_down(r.activation, r.down, r.ends),
            lambda: torchs(r.activation, r.down.transpose(1, 2)),
            d * f,
        ),
        "d_gate_up + SwiGLU": (
            lambda: ours.expert_d_gate_up(r.d_out, r.down, r.gate_up, r.weight, r.ends)[0],
            lambda: expert_rows.weighted_swiglu_backward(torchs(r.d_out, r.down), r.gate_up, r.weight)[0],
            d * f,
        ),
        "dx": (
            lambda: ours.expert_dx(r.gate_up, r.gate_up_weights, r.ends),
            lambda: torchs(r.gate_up, r.gate_up_weights),
            n * d,
        ),
        "gate_up weights": (
            lambda: ours.expert_outer(r.gate_up, r.x, r.ends),
            lambda: torchs(r.gate_up.t(), r.x),
            n * d,
        ),
        "down weights": (
            lambda: ours.expert_outer(r.d_out, r.activation, r.ends),
            lambda: torchs(r.d_out.t(), r.activation),
            d * f,
        ),
    }


def fp8_matmuls(rows: Rows) -> dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor], int]]:
    """Ours of fp8 numbers next to ours in bf16; empty where we have none."""
    r, (experts, n, d), f = rows, rows.gate_up_weights.shape, rows.down.shape[2]
    if not rows.x.is_cuda or not grouped_gemm.can_multiply_fp8(r.x, r.gate_up_weights.shape):
        return {}
    one_m, e4m3, e5m2 = torch.ones(len(r.x), device=r.x.device), torch.float8_e4m3fn, torch.float8_e5m2
    # Weights are multiplied by 64, so that they are no subnormal numbers.
    one_e, down_e = torch.ones(experts, device=r.x.device), torch.full((experts,), 1 / 64, device=r.x.device)
    x8, d_out8, activation8, d_gate_up8 = r.x.to(e4m3), r.d_out.to(e4m3), r.activation.to(e4m3), r.gate_up.to(e5m2)
    weights8, down8 = ((part * 64).to(e4m3) for part in (r.gate_up_weights, r.down))
    weights8t, down8t = (part.transpose(1, 2).contiguous() for part in (weights8, down8))
    runs, order = experts_fp8.runs_of(r.ends, len(r.x)), torch.arange(len(r.x), device=r.x.device)
    transposed = [
        experts_fp8.spread_transposed(part, order, *runs, 1) for part in (x8, d_out8, r.activation.to(e5m2), d_gate_up8)
    ]
    bf16 = matmuls(rows)

    def d_gate_up() -> Tensor:
        dy = grouped_gemm.expert_matmul_fp8(d_out8, down8t, r.ends, (one_m, down_e))
        return experts_fp8.swiglu_backward_fp8(dy, r.gate_up, [r.weight, one_m, one_m, one_m], *runs, True)[0]

    ours: dict[str, tuple[Callable[[], Tensor], int]] = {
        "gate_up + SwiGLU": (
            lambda: grouped_gemm.expert_gate_up(x8, weights8, r.weight, r.ends, (one_m, down_e))[0],
            n * d,
        ),
        "down": (lambda: grouped_gemm.expert_matmul_fp8(activation8, down8, r.ends, (one_m, down_e)), d * f),
        "d_gate_up + SwiGLU": (d_gate_up, d * f),
        "dx": (lambda: grouped_gemm.expert_matmul_fp8(d_gate_up8, weights8t, r.ends, (one_m, down_e)), n * d),
        "gate_up weights": (
            lambda: grouped_gemm.expert_outer_fp8(transposed[3], transposed[0], one_e, *runs),
            n * d,
        ),
        "down weights": (lambda: grouped_gemm.expert_outer_fp8(transposed[1], transposed[2], one_e, *runs), d * f),
    }
    return {f"fp8 {name}": (call, bf16[name][0], per_row) for name, (call, per_row) in ours.items()}


def is_fused(rows: Rows) -> bool:
    """Whether `ours` are our kernels; else they are torch's with more around them."""
    return rows.x.is_cuda and grouped_gemm.can_multiply(rows.x, rows.gate_up_weights.shape)


def kernels_part(result: dict[str, Any], args: argparse.Namespace) -> None:
    device = torch.device("cpu" if args.tiny else "cuda")
    clock, found = Clock(device), {}
    for name, shape in (TINY_SHAPES if args.tiny else SHAPES).items():
        fresh()
        rows = random_rows(shape, device)
        found[name] = {}
        # In fp8, "torch" is ours in bf16.
        for part, (ours, torchs, per_row) in {**matmuls(rows), **fp8_matmuls(rows)}.items():
            one, other = ours().float(), torchs().float()
            numbers = {"difference": ((one - other).norm() / other.norm()).item()}
            numbers["our_kernel"] = float(is_fused(rows))
            numbers["same_bits"] = float(torch.equal(one, ours().float()))
            del one, other
            for side, call in (("torch", torchs), ("ours", ours), ("torch again", torchs), ("ours again", ours)):
                clock.seconds(2, call)
                seconds = statistics.median(clock.seconds(2 if args.tiny else 15, call))
                numbers[side] = 2 * len(rows.x) * per_row / seconds / 1e12
            found[name][part] = numbers
        x, place = rows.x[: shape.tokens], rows.tokens.argsort(stable=True)
        moved = {
            "spread": lambda x=x, place=place, k=shape.top_k: expert_rows.spread_rows(x, place, k),
            "sum": lambda rows=rows, place=place, k=shape.top_k: expert_rows.sum_rows(rows.x, place, k),
        }
        found[name]["milliseconds"] = {
            part: 1000 * statistics.median(clock.seconds(15, call)) for part, call in moved.items()
        }
        result["kernels"] = found
        write_json(args.out, result)


def layer_part(result: dict[str, Any], args: argparse.Namespace) -> None:
    device = torch.device("cpu" if args.tiny else "cuda")
    result.setdefault("layers", {})
    for name, shape in (TINY_SHAPES if args.tiny else SHAPES).items():
        found = compare_layers(shape, device, 1 if args.tiny else 5, 2 if args.tiny else 6, compiles=not args.tiny)
        result["layers"][name] = found
        result[f"layer_ratio_{name}"] = found["ratio"]
        write_json(args.out, result)


def config(args: argparse.Namespace, *words: str) -> RunConfig:
    """Compiled, unless it is tiny: those words come last and override all others."""
    return load_config(None, ["compute.compile=true", *words, *(TINY if args.tiny else ())]).config


def fitting_step(args: argparse.Namespace, rows: list[int], *words: str) -> dict[str, Any]:
    """Times of steps with as many rows as fit."""
    for count in rows:
        fresh()
        run = config(args, *words, f"global_batch={count}", f"microbatch={count}")
        try:
            return asdict(bench_step(run, 2 if args.tiny else 8, warmup=1 if args.tiny else 4))
        except torch.cuda.OutOfMemoryError:
            print(f"{count} rows do not fit")
    raise MemoryError(f"not even {rows[-1]} rows fit")


def steps_part(result: dict[str, Any], args: argparse.Namespace) -> None:
    rows = [2] if args.tiny else [8, 6, 4, 2]
    result["qwen3_8layer"] = fitting_step(args, rows, "model=qwen3-30b-a3b", "model.layers=8", "precision=bf16")
    result["qwen3_8layer_tokens_per_s"] = result["qwen3_8layer"]["tokens_per_s"]
    write_json(args.out, result)
    result["olmoe"] = fitting_step(args, rows, "model=olmoe-1b-7b", "precision=bf16")
    result["olmoe_mfu"] = result["olmoe"]["mfu"]
    write_json(args.out, result)


def final_loss(args: argparse.Namespace, precision: str, folder: Path) -> float:
    """Mean loss of the last 20 real steps on the demo's text, the learning rate falling to zero."""
    fresh()
    steps = 4 if args.tiny else 300
    run = config(
        args, "model=olmoe-1b-7b", "model.layers=4", "global_batch=4", "microbatch=4", f"max_duration={steps}ba",
        "optimizer.lr=1e-4", f"schedule.warmup={steps // 3}ba", "schedule.final=0", "data=demo",
        f"precision={precision}", f"name={precision}", f"runs_dir={folder}", "checkpoint.at_end=false",
        "evaluate.at_end=false", "observe.tensorboard=false", *(["data=synthetic"] if args.tiny else []),
    )  # fmt: skip
    train(run)
    lines = [json.loads(line) for line in (folder / precision / "metrics.jsonl").read_text().splitlines()]
    return statistics.mean(line["loss"] for line in lines[-20:])


def fp8_part(result: dict[str, Any], args: argparse.Namespace) -> None:
    rows = [2] if args.tiny else [8, 4]
    for name, preset, layers in (("", "olmoe-1b-7b", 8), ("_mixtral", "mixtral-8x7b", 3)):
        steps = {
            precision: fitting_step(args, rows, f"model={preset}", f"model.layers={layers}", f"precision={precision}")
            for precision in ("bf16", "fp8")
        }
        result[f"fp8_steps{name}"] = steps
        result[f"fp8_over_bf16{name}"] = steps["fp8"]["tokens_per_s"] / steps["bf16"]["tokens_per_s"]
        write_json(args.out, result)
    with tempfile.TemporaryDirectory() as folder:
        losses = {precision: final_loss(args, precision, Path(folder)) for precision in ("bf16", "fp8")}
    result["fp8_losses"] = losses
    result["fp8_loss_difference"] = abs(losses["fp8"] / losses["bf16"] - 1)
    write_json(args.out, result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--tiny", action="store_true", help="small shapes on a CPU")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    result: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    result["torch"] = torch.__version__
    result["device"] = "cpu" if args.tiny else torch.cuda.get_device_name()
    measure = {"kernels": kernels_part, "layer": layer_part, "steps": steps_part, "fp8": fp8_part}
    for part in args.parts:
        started = time.perf_counter()
        try:
            measure[part](result, args)
        except KeepstepError as refused:
            print(f"{part}: {refused}")
        print(f"{part}: {time.perf_counter() - started:.0f} s")
    for key in KEYS:
        print(f"{key:<28}{result.get(key)}")
    for name, found in result.get("kernels", {}).items():
        for part, numbers in found.items():
            print(f"{name:<10}{part:<22}" + "  ".join(f"{key} {value:.4g}" for key, value in numbers.items()))
    for name, found in result.get("layers", {}).items():
        print(name, json.dumps({key: value for key, value in found.items() if key != "shape"}, indent=1))


if __name__ == "__main__":
    main()
