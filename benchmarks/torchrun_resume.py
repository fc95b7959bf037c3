"""The torchrun part of the recovery benchmark: plain torchrun and a DCP resume, as good as the libraries allow.

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nproc-per-node 2 --max-restarts 3 benchmarks/torchrun_resume.py \
        --folder F --kill-at 12 -- model.layers=4 ...

Same model, optimizer and precision as keepstep's run; checkpoints with `dcp.save` every `--save-every` steps; after a
restart `dcp.load` into a state from `get_state_dict`. Rank 1 kills itself once after `--kill-at`. Times are in
F/times.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from keepstep.config.load import load_config
from keepstep.models.init import init_weights
from keepstep.models.transformer import Transformer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kill-at", type=int, required=True)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("words", nargs="*")
    args = parser.parse_args()
    config = load_config(None, args.words).config
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)

    def record(what: str, step: int) -> None:
        if rank == 0 or what == "killed":
            with (args.folder / "times.jsonl").open("a") as file:
                file.write(json.dumps({"what": what, "step": step, "time": time.time()}) + "\n")

    with torch.device("meta"):
        model = Transformer(config.model)
    for block in model.blocks.values():
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device="cpu")
    init_weights(model, config.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optimizer.lr, fused=True)
    step = 0
    newest = max(args.folder.glob("step_*/.metadata"), default=None)
    if newest is not None:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": torch.zeros((), dtype=torch.int64)}
        dcp.load(state, checkpoint_id=newest.parent)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        step = int(state["step"])
    record("ready", step)
    generator = torch.Generator().manual_seed(rank)
    while step < args.steps:
        rows = torch.randint(0, config.model.vocab, (config.microbatch, config.model.seq_len + 1), generator=generator)
        model(rows[:, :-1], rows[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step == args.kill_at and rank == 1 and int(os.environ["TORCHELASTIC_RESTART_COUNT"]) == 0:
            record("killed", step)
            os.kill(os.getpid(), signal.SIGKILL)
        if step % args.save_every == 0:
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": moments, "step": torch.tensor(step)}
            dcp.save(state, checkpoint_id=args.folder / f"step_{step:08}")
    record("done", step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
