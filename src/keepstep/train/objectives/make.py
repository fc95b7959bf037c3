"""From the configuration to the objective."""

from __future__ import annotations

from keepstep.config.schema import RunConfig
from keepstep.data.loader import Loaders
from keepstep.models.transformer import Transformer
from keepstep.train.objectives.objective import Objective
from keepstep.train.objectives.policy import Policy, PolicyObjective
from keepstep.train.objectives.preference import PreferenceObjective, Reference
from keepstep.train.objectives.tasks import PromptTasks


def make_objective(
    config: RunConfig, model: Transformer, frozen: Transformer | None, loaders: Loaders | None
) -> Objective:
    """What the run learns; `frozen` is a copy of its first weights, where it has a reference other than itself."""
    reference = Reference(model, frozen) if config.has_reference else None
    if config.rl.method != "none":
        tasks = PromptTasks.of(loaders, config.chat.template)
        exact = config.reproducible == "elastic"
        return PolicyObjective(config.rl, Policy(model, reference), tasks, config.seed, exact=exact)
    return Objective() if reference is None else PreferenceObjective(config.preference, reference)
