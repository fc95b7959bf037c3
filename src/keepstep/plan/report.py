"""A plan as JSON values, and as lines for a terminal: one section per question, then the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from keepstep.config.schema import RunConfig
from keepstep.core.units import format_bytes, format_count, format_seconds
from keepstep.models.size import active_parameters, parameter_count
from keepstep.plan.capacity import HostPlan, machines_for_host
from keepstep.plan.cluster import GIB, Machine
from keepstep.plan.goodput import LLAMA3_GPUS, SaveTime, llama3_share
from keepstep.plan.plan import Plan, plan_on_machine
from keepstep.plan.search import Candidate, pareto


def plan_for_run(config: RunConfig, machine: Machine) -> dict[str, Any]:
    """The plan of a run on the machine it has started on: stored with the run and read by its report."""
    return as_values(plan_on_machine(config, machine))


def as_values(plan: Plan) -> dict[str, Any]:
    """The plan as JSON; names end with their unit."""
    work, cluster, memory, speed = plan.work, plan.cluster, plan.memory, plan.speed
    recovery = plan.assumptions.recovery
    return {
        "model": plan.config.model.preset,
        "parameters": parameter_count(plan.config.model),
        "active_parameters": active_parameters(plan.config.model),
        "cluster": {"name": cluster.name, "gpu": cluster.gpu.name, "nodes": cluster.nodes, "gpus": cluster.gpus},
        "layout": {**asdict(work.degrees), "microbatch": work.microbatch, "microbatches": work.microbatches},
        "chosen": list(plan.chosen),
        "precision": work.precision,
        "recompute": work.recompute_text,
        "memory": {
            "parts_gib": {name: size / GIB for name, size in asdict(memory.parts).items()},
            "allocated_gib": memory.allocated / GIB,
            "slack_gib": memory.slack / GIB,
            "needed_gib": memory.needed / GIB,
            "available_gib": cluster.gpu.memory_gib,
            "instant": memory.instant,
            "stage": memory.stage,
            "fits": plan.fits_device,
            "needed_by_recompute_gib": {mode: each.needed / GIB for mode, each in plan.by_recompute.items()},
            "remedies": [
                {"words": list(each.overrides), "needed_gib": each.needed_bytes / GIB, "step_s": each.step_s}
                for each in plan.remedies
            ],
        },
        "host": {
            "offloaded_gib": plan.host.offloaded / GIB,
            "activations_gib": plan.host.activations / GIB,
            "copy_gib": plan.host.copy / GIB,
            "processes_gib": plan.host.processes / GIB,
            "needed_gib": plan.host.needed / GIB,
            "available_gib": plan.host.available_gib or None,
            "fits": plan.host.fits,
        },
        "speed": {
            **asdict(speed.step),
            "step_s": speed.step.total_s,
            "communication_s": speed.traffic_s,
            "flops_per_token": speed.flops_per_token,
            "tokens_per_step": work.tokens_per_step,
            "tokens_per_s": speed.tokens_per_s,
            "tokens_per_s_per_gpu": speed.tokens_per_s_per_gpu,
            "mfu": speed.mfu if plan.cluster.unit == "GPU" else None,
            "calibrated_by_runs": plan.assumptions.calibrated_by,
        },
        "run": {"steps": plan.steps, "busy_s": plan.busy_s, "wall_s": plan.wall_s, "cost": plan.cost},
        "storage": {
            **vars(plan.storage),
            "saves": [_save_values(each) for each in plan.storage.saves],
            "cheapest": None if plan.storage.cheapest is None else _save_values(plan.storage.cheapest),
        },
        "goodput": {
            **asdict(plan.goodput),
            "recovery": asdict(recovery),
            "llama3_share": llama3_share(replace(recovery, lag_s=0.0)),
        },
        "survival": {"replica": asdict(plan.replica), "scales": [asdict(each) for each in plan.survival]},
    }


def _save_values(save: SaveTime) -> dict[str, Any]:
    return {**asdict(save), "minutes": save.minutes, "minutes_mixed_units": save.minutes_mixed_units}


def plan_lines(plan: Plan) -> Iterator[str]:
    """The whole report, without the verdict."""
    yield from _run(plan)
    sections = [_memory, _speed, _storage, _goodput]
    # A handful of GPUs rarely fails.
    if plan.cluster.nodes > 1 or plan.config.resilience.survive:
        sections.append(_survival)
    for section in sections:
        yield ""
        yield from section(plan)


def verdict(plan: Plan) -> str:
    """The answer in one line."""
    memory = f"{plan.memory.needed / GIB:.1f} of {plan.cluster.gpu.memory_gib:.1f} GiB per {plan.cluster.unit}"
    if plan.fits_device and not plan.host.fits:
        machine = f"{plan.host.needed / GIB:.0f} of {plan.host.available_gib:.0f} GiB per machine"
        return f"verdict: does not fit, needs {machine}"
    if not plan.fits:
        first = f"; smallest change: {' '.join(plan.remedies[0].overrides)}" if plan.remedies else ""
        return f"verdict: does not fit, needs {memory}{first}"
    parts = [f"verdict: fits, {memory}", f"{plan.speed.tokens_per_s:,.0f} tokens/s{_mfu(plan, ' (MFU {:.0%})')}"]
    if plan.wall_s is not None:
        parts.append(format_seconds(plan.wall_s))
    if plan.cost is not None:
        parts.append(f"about ${plan.cost:,.0f}")
    parts.append(f"{plan.effective_share:.1%} of the time effective")
    return ", ".join(parts)


def next_command(plan: Plan, words: str, cluster: str, profiles: str = "") -> str:
    """What to do after reading the plan: train, or plan again with a change that fits."""
    where = f"{profiles} {cluster}".strip()
    if _lacks_fp8(plan) and plan.cluster.unit == "GPU":
        given, better = "precision=fp8", "precision=bf16"
        changed = words.replace(given, better) if given in words else f"{words} {better}"
        return f"next: keepstep plan {changed} {where}"
    if plan.fits:
        return f"next: keepstep train {words}".rstrip()
    if plan.fits_device:
        more = f"{profiles} --cluster {plan.cluster.name}:{machines_for_host(plan.host, plan.cluster.nodes)}".strip()
        return f"next: keepstep plan {words} {more}, or machines with more memory"
    if plan.remedies:
        return f"next: keepstep plan {words} {' '.join(plan.remedies[0].overrides)} {where}"
    larger = "more or larger GPUs" if plan.cluster.unit == "GPU" else "a machine with more memory"
    return f"next: keepstep plan {words} {where} --search, or {larger}"


def _lacks_fp8(plan: Plan) -> bool:
    return plan.work.precision == "fp8" and "fp8" not in plan.cluster.gpu.tflops


def _run(plan: Plan) -> Iterator[str]:
    model, work, cluster = plan.config.model, plan.work, plan.cluster
    active = f" ({format_count(active_parameters(model))} active)" if model.expert_layers else ""
    base = f" with frozen weights in {work.lora_base}" if work.lora_base != "bf16" else ""
    yield (
        f"run       {model.preset}, {format_count(parameter_count(model))} parameters{active}, "
        f"rows of {model.seq_len:,} tokens, {work.precision}{base}, recompute {work.recompute_text}"
        f"{', activations offloaded' if work.offload_activations else ''}"
        f"{f', feed-forward in chunks of {work.mlp_tokens:,} tokens' if work.chunks_mlp else ''}"
    )
    machines = f"{cluster.nodes} × {cluster.gpus_per_node} {cluster.gpu.name}"
    yield f"cluster   {cluster.name}: {machines}{f' ({cluster.sku})' if cluster.sku else ''}"
    auto = " (auto)" if plan.chose_microbatch else ""
    yield (
        f"layout    {work.degrees.text()}; {work.microbatches} micro batches of {work.microbatch}{auto} per process, "
        f"{format_count(work.tokens_per_step)} tokens per step"
    )
    if plan.chosen:
        why = "the fastest that fits" if plan.fits_device else "no layout fits; this one needs little memory"
        yield f"chosen    {' '.join(plan.chosen)}  (not given: {why})"
    if cluster.gpu.note:
        yield f"note      {cluster.gpu.note}"
    if _lacks_fp8(plan):
        yield f"note      {cluster.gpu.name} has no rate for fp8: it saves no time, and GPUs without it are refused"


def _memory(plan: Plan) -> Iterator[str]:
    memory, limit = plan.memory, plan.cluster.gpu.memory_gib
    stage = f", pipeline stage {memory.stage}" if plan.work.degrees.pipeline > 1 else ""
    where = "on the fullest GPU" if plan.cluster.unit == "GPU" else "of host memory for the fullest process"
    yield f"memory    GiB {where} at the peak ({memory.instant}{stage})"
    for name, size in (*vars(memory.parts).items(), ("slack", memory.slack)):
        yield f"  {name:<14}{size / GIB:9.2f}"
    fits = "fits" if plan.fits_device else "does not fit"
    yield f"  {'needed':<14}{memory.needed / GIB:9.2f} of {limit:.1f}   {fits}"
    yield from _host(plan.host)
    modes = ", ".join(f"{mode} {each.needed / GIB:.1f}" for mode, each in plan.by_recompute.items())
    yield f"  by recompute  {modes}"
    for remedy in plan.remedies:
        overrides = " ".join(remedy.overrides)
        yield f"  would fit     {overrides}  ({remedy.needed_bytes / GIB:.1f} GiB, {remedy.step_s:.2f} s per step)"


def _host(host: HostPlan) -> Iterator[str]:
    limit = f" of {host.available_gib:.1f}   {'fits' if host.fits else 'does not fit'}" if host.available_gib else ""
    yield f"  {'host memory':<14}{host.needed / GIB:9.2f}{limit}   ({host.parts()})"


def _speed(plan: Plan) -> Iterator[str]:
    speed, step = plan.speed, plan.speed.step
    runs = plan.assumptions.calibrated_by
    source = f"calibrated by {runs} measured run{'s' if runs > 1 else ''}" if runs else "not calibrated"
    yield f"speed     {step.total_s:.3f} s per step ({source}), {format_count(speed.flops_per_token)}FLOP per token"
    compute = [(kind, getattr(step, f"{kind}_s")) for kind in ("matmul", "attention", "memory", "update")]
    waits = [(f"{axis} wait", seconds) for axis, seconds in step.exposed_s.items()]
    waits.append(("kernel starts", step.launch_s))
    for name, seconds in (*compute, *waits, ("bubble", step.bubble_s), ("fixed", step.fixed_s)):
        if seconds > 0:
            yield f"  {name:<14}{seconds:9.3f} s {seconds / step.total_s:6.1%}"
    if step.launch_s > 0.1 * step.total_s:
        yield "  kernels are shorter than their start: raise microbatch, or set compute.compile=true"
    if plan.work.offload:
        yield "  not included: copies of weights and gradients between host and GPU, and the update on the host"
    each = f"{speed.tokens_per_s_per_gpu:,.0f} per {plan.cluster.unit}"
    yield f"  {speed.tokens_per_s:,.0f} tokens/s, {each}{_mfu(plan, ', MFU {:.1%}')}{_length(plan)}"


def _mfu(plan: Plan, form: str) -> str:
    """The share of the peak; nothing on a CPU, whose peak is not known."""
    return form.format(plan.speed.mfu) if plan.cluster.unit == "GPU" else ""


def _length(plan: Plan) -> str:
    if plan.wall_s is None:
        return "; the length of the run depends on the data"
    cost = f", about ${plan.cost:,.0f}" if plan.cost is not None else ""
    steps = f"; {plan.steps:,} steps" if plan.steps is not None else ""
    return f"{steps} in {format_seconds(plan.wall_s)}{cost}"


def _storage(plan: Plan) -> Iterator[str]:
    storage = plan.storage
    data = f"; tokens on disk {format_bytes(storage.dataset_bytes)}" if storage.dataset_bytes else ""
    yield f"storage   a checkpoint is {format_bytes(storage.checkpoint_bytes)}, at most {storage.copies} on disk{data}"
    if storage.local_save_s is not None:
        yield f"  {'local disks':<18}{storage.local_save_s:9.1f} s"
    for save in storage.saves:
        yield f"  {save.tier:<18}{save.seconds:9.1f} s at {save.size_tib:g} TiB, {save.write_gb_s:g} GB/s"
    best, within = storage.cheapest, format_seconds(storage.save_within_s)
    if best is not None:
        yield (
            f"  cheapest under {within}: {best.sku or best.tier} of {best.size_tib:g} TiB, "
            f"{best.seconds:.1f} s, about ${best.price_per_month:,.0f} per month"
        )
    elif storage.saves:
        yield f"  no storage of this cluster saves within {within}"


def _goodput(plan: Plan) -> Iterator[str]:
    goodput, recovery = plan.goodput, plan.assumptions.recovery
    yield (
        f"goodput   a failure every {format_seconds(goodput.mtbf_s)}; save stall {recovery.stall_s:g} s, counts after "
        f"{recovery.lag_s:.0f} s, restart {recovery.restart_s:g} s"
    )
    yield (
        f"  best interval {format_seconds(goodput.best_interval_s)}: {goodput.best_share:.2%} effective "
        f"(simulated {goodput.simulated_share:.2%})"
    )
    if goodput.interval_s is not None and goodput.share is not None:
        yield f"  this run's    {format_seconds(goodput.interval_s)}: {goodput.share:.2%} effective"
    there = llama3_share(replace(recovery, lag_s=0.0))
    yield f"  the same stall and restart on Llama 3's {LLAMA3_GPUS:,} GPUs: {there:.1%} (published: more than 90%)"


def _survival(plan: Plan) -> Iterator[str]:
    recovery, size = plan.assumptions.recovery, f"{plan.replica.gpus:,} {plan.cluster.unit}s"
    yield (
        f"survival  replicas of {size}, back after {format_seconds(recovery.restart_s)}; "
        f"a loss costs the others a step and {recovery.replica_stall_s:g} s, a return {recovery.join_stall_s:g} s"
    )
    yield f"  {'GPUs':>9}  {'a failure every':>15}  {'restart':>8}  {'survive':>8}  with spares"
    for each in plan.survival:
        spares = (
            f"{each.spares_share:11.2%}, {each.spares} of {each.replicas} replicas" if each.spares else "       none"
        )
        yield (
            f"  {each.gpus:9,}  {format_seconds(each.mtbf_s):>15}  {each.restart_share:8.2%}  {each.survive_share:8.2%}"
            f"  {spares}"
        )


def search_lines(candidates: Sequence[Candidate], seconds: float, top: int) -> Iterator[str]:
    """The best layouts as a table, each with its overrides."""
    fitting = sum(each.fits for each in candidates)
    yield f"search    {len(candidates):,} layouts in {seconds:.1f} s, {fitting:,} fit"
    yield f"  {'step s':>8} {'GiB':>7} {'MFU':>6}  layout"
    for each in candidates[:top]:
        mark = "" if each.fits else "  (does not fit)"
        yield f"  {each.step_s:8.3f} {each.needed_bytes / GIB:7.1f} {each.mfu:6.1%}  {' '.join(each.overrides())}{mark}"


def search_values(candidates: Sequence[Candidate], seconds: float, top: int) -> dict[str, Any]:
    """The result of a search as JSON."""
    return {
        "layouts": len(candidates),
        "fitting": sum(each.fits for each in candidates),
        "seconds": seconds,
        "best": [_candidate_values(each) for each in candidates[:top]],
        "pareto": [_candidate_values(each) for each in pareto(candidates)],
    }


def _candidate_values(candidate: Candidate) -> dict[str, Any]:
    return {
        "words": candidate.overrides(),
        "step_s": candidate.step_s,
        "needed_gib": candidate.needed_bytes / GIB,
        "tokens_per_s": candidate.tokens_per_s,
        "mfu": candidate.mfu,
        "fits": candidate.fits,
    }
