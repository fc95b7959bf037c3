"""`keepstep eval lm`: tasks of lm-evaluation-harness on a run or a Hugging Face folder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from keepstep.core.errors import UsageError
from keepstep.train.speaker import Speaker


def harness_model(speaker: Speaker, batch: int) -> Any:
    """The harness's view of a model."""
    try:
        from keepstep.evaluate.lm_eval import KeepstepLM
    except ImportError:
        raise UsageError("lm-evaluation-harness is not installed", "pip install 'keepstep[lm-eval]'") from None
    device = next(speaker.model.parameters()).device

    def logits(tokens_bt: Tensor) -> Tensor:
        found: Tensor = speaker.model(tokens_bt.to(device))[..., : speaker.config.model.vocab]
        return found

    return KeepstepLM(
        logits, speaker.open_decoder, speaker.tokenizer, ends=speaker.ends, room=speaker.room, batch=batch
    )


@torch.no_grad()
def run_tasks(speaker: Speaker, tasks: list[str], batch: int, limit: int = 0) -> dict[str, dict[str, float]]:
    """The numbers of each task, as the harness names them."""
    if not tasks:
        raise UsageError("no task was named", "--tasks hellaswag,arc_easy")
    model = harness_model(speaker, batch)
    from lm_eval import simple_evaluate

    found = simple_evaluate(model=model, tasks=tasks, limit=limit or None, bootstrap_iters=0)
    results: dict[str, dict[str, Any]] = found["results"]
    return {
        task: {name.split(",")[0]: float(value) for name, value in numbers.items() if isinstance(value, int | float)}
        for task, numbers in results.items()
    }
