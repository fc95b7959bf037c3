"""A plan as lines for a terminal: one block a question, then the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from keepstep.core.units import format_bytes, format_count, format_seconds
from keepstep.models.size import parameter_count
from keepstep.plan.goodput import LLAMA3_GPUS, llama3_share
from keepstep.plan.host import HostPlan
from keepstep.plan.plan import GIB, Plan
from keepstep.plan.search import Candidate


def plan_lines(plan: Plan) -> Iterator[str]:
    """The whole report, without the last line."""
    yield from _run(plan)
    yield ""
    yield from _memory(plan)
    yield ""
    yield from _speed(plan)
    yield ""
    yield from _storage(plan)
    yield ""
    yield from _goodput(plan)


def verdict(plan: Plan) -> str:
    """One line that says it all."""
    memory = f"{plan.memory.needed / GIB:.1f} of {plan.cluster.gpu.memory_gib:.1f} GiB a GPU"
    if plan.fits_device and not plan.host.fits:
        return (
            f"verdict: does not fit, needs {plan.host.needed / GIB:.0f} of {plan.host.available_gib:.0f} GiB a machine"
        )
    if not plan.fits:
        first = f"; smallest change: {' '.join(plan.remedies[0].words)}" if plan.remedies else ""
        return f"verdict: does not fit, needs {memory}{first}"
    parts = [f"verdict: fits, {memory}", f"{plan.speed.tokens_per_s:,.0f} tokens/s (MFU {plan.speed.mfu:.0%})"]
    if plan.wall_s is not None:
        parts.append(format_seconds(plan.wall_s))
    if plan.cost is not None:
        parts.append(f"about ${plan.cost:,.0f}")
    parts.append(f"{plan.effective_share:.1%} of the time effective")
    return ", ".join(parts)


def _run(plan: Plan) -> Iterator[str]:
    model, work, cluster = plan.config.model, plan.work, plan.cluster
    yield (
        f"run       {model.preset}, {format_count(parameter_count(model))} parameters, "
        f"rows of {model.seq_len:,} tokens, {work.precision}, recompute {work.recompute}"
    )
    machines = f"{cluster.nodes} × {cluster.gpus_per_node} {cluster.gpu.name}"
    yield f"cluster   {cluster.name}: {machines}{f' ({cluster.sku})' if cluster.sku else ''}"
    yield (
        f"layout    {work.degrees.spelled()}; {work.microbatches} micro batches of {work.microbatch} a process, "
        f"{format_count(work.tokens_per_step)} tokens a step"
    )


def _memory(plan: Plan) -> Iterator[str]:
    memory, limit = plan.memory, plan.cluster.gpu.memory_gib
    stage = f", pipeline stage {memory.stage}" if plan.work.degrees.pipeline > 1 else ""
    yield f"memory    GiB on the fullest GPU at the peak ({memory.instant}{stage})"
    parts = [
        ("parameters", memory.parts.parameters),
        ("gradients", memory.parts.gradients),
        ("optimizer", memory.parts.optimizer),
        ("activations", memory.parts.activations),
        ("logits", memory.parts.logits),
        ("buffers", memory.parts.buffers),
        ("slack", memory.slack),
    ]
    for name, size in parts:
        yield f"  {name:<14}{size / GIB:9.2f}"
    fits = "fits" if plan.fits_device else "does not fit"
    yield f"  {'needed':<14}{memory.needed / GIB:9.2f} of {limit:.1f}   {fits}"
    yield from _host(plan.host)
    modes = ", ".join(f"{mode} {each.needed / GIB:.1f}" for mode, each in plan.by_recompute.items())
    yield f"  by recompute  {modes}"
    for remedy in plan.remedies:
        words = " ".join(remedy.words)
        yield f"  would fit     {words}  ({remedy.needed_bytes / GIB:.1f} GiB, {remedy.step_s:.2f} s a step)"


def _host(host: HostPlan) -> Iterator[str]:
    parts = [("offloaded", host.offloaded), ("copy for saves", host.copy)]
    told = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts if size)
    limit = f" of {host.available_gib:.1f}   {'fits' if host.fits else 'does not fit'}" if host.available_gib else ""
    yield f"  {'a machine':<14}{host.needed / GIB:9.2f}{limit}   ({told})"


def _speed(plan: Plan) -> Iterator[str]:
    speed, step = plan.speed, plan.speed.step
    runs = plan.assumptions.calibrated_by
    source = f"calibrated by {runs} measured run{'s' if runs > 1 else ''}" if runs else "not calibrated"
    yield f"speed     {step.total_s:.3f} s a step ({source}), {format_count(speed.flops_per_token)}FLOP a token"
    shares = [
        ("products", step.matmul_s),
        ("attention", step.attention_s),
        ("memory", step.memory_s),
        ("update", step.update_s),
        *((f"{axis} wait", seconds) for axis, seconds in step.exposed_s.items()),
        ("bubble", step.bubble_s),
        ("fixed", step.fixed_s),
    ]
    for name, seconds in shares:
        if seconds > 0:
            yield f"  {name:<14}{seconds:9.3f} s {seconds / step.total_s:6.1%}"
    if plan.work.offload:
        yield "  beside it, not planned: moving weights and gradients between host and GPU, and the update on the host"
    yield (
        f"  {speed.tokens_per_s:,.0f} tokens/s, {speed.tokens_per_s_per_gpu:,.0f} a GPU, MFU {speed.mfu:.1%}"
        f"{_length(plan)}"
    )


def _length(plan: Plan) -> str:
    if plan.wall_s is None:
        return "; how long the run is depends on the data"
    cost = f", about ${plan.cost:,.0f}" if plan.cost is not None else ""
    steps = f"; {plan.steps:,} steps" if plan.steps is not None else ""
    return f"{steps} in {format_seconds(plan.wall_s)}{cost}"


def _storage(plan: Plan) -> Iterator[str]:
    storage = plan.storage
    data = f"; tokens on disk {format_bytes(storage.dataset_bytes)}" if storage.dataset_bytes else ""
    yield f"storage   a checkpoint is {format_bytes(storage.checkpoint_bytes)}, {storage.kept} at most at once{data}"
    if storage.local_s is not None:
        yield f"  {'local disks':<18}{storage.local_s:9.1f} s"
    for save in storage.saves:
        yield f"  {save.tier:<18}{save.seconds:9.1f} s at {save.size_tib:g} TiB, {save.write_gb_s:g} GB/s"
    if storage.cheapest is not None:
        best = storage.cheapest
        yield (
            f"  cheapest under {format_seconds(storage.wanted_s)}: {best.sku or best.tier} of {best.size_tib:g} TiB, "
            f"{best.seconds:.1f} s, about ${best.price_per_month:,.0f} a month"
        )
    elif storage.saves:
        yield f"  no storage of this cluster saves within {format_seconds(storage.wanted_s)}"


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
    from dataclasses import replace

    there = llama3_share(replace(recovery, lag_s=0.0))
    yield f"  the same stall and restart on Llama 3's {LLAMA3_GPUS:,} GPUs: {there:.1%} (published: more than 90%)"


def search_lines(candidates: Sequence[Candidate], seconds: float, top: int) -> Iterator[str]:
    """The best layouts as a table, each with the words that ask for it."""
    fitting = sum(each.fits for each in candidates)
    yield f"search    {len(candidates):,} layouts in {seconds:.1f} s, {fitting:,} fit"
    yield f"  {'step s':>8} {'GiB':>7} {'MFU':>6}  layout"
    for each in candidates[:top]:
        mark = "" if each.fits else "  (does not fit)"
        yield f"  {each.step_s:8.3f} {each.needed_bytes / GIB:7.1f} {each.mfu:6.1%}  {' '.join(each.words())}{mark}"
