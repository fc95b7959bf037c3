"""Preference learning: DPO (Rafailov et al. 2023), IPO (Azar et al. 2023) and KTO (Ethayarajh et al. 2024).

Shape legend: b rows, t tokens, k pairs of a row, n pairs; 2 the documents of a pair.

Both documents of a pair are in one row. What counts is how much more likely an answer became than under the reference,
the frozen weights that the run started from: the log-ratio. β times the log-ratio is the answer's implicit reward.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

from keepstep.config.schema import PreferenceConfig
from keepstep.core.tokens import IGNORE_INDEX
from keepstep.data.batch import Batch
from keepstep.models.lora import adapters_off
from keepstep.models.transformer import Transformer
from keepstep.train.objectives.objective import ModelCall, Objective


class Reference:
    """The model as it was before training: a frozen copy or, with adapters, the model without them."""

    def __init__(self, policy: Transformer, frozen: Transformer | None) -> None:
        self._policy, self._frozen = policy, frozen

    @torch.no_grad()
    def token_losses(self, call: ModelCall, batch: Batch) -> Tensor:
        """The loss of each token, without dropout."""
        if self._frozen is not None:
            losses_bt = call(batch, model=self._frozen, each_loss=True)
            if isinstance(self._frozen, FSDPModule):
                # No backward pass follows that would free the gathered embedding and head.
                self._frozen.reshard()
            return losses_bt
        training = self._policy.training
        self._policy.eval()
        with adapters_off(self._policy):
            losses_bt = call(batch, each_loss=True)
        self._policy.train(training)
        return losses_bt


def pair_sums(values_bt: Tensor, documents_bt: Tensor, pairs: int) -> Tensor:
    """Sums of values over each document of each pair [b, k, 2]."""
    # A mask and a sum, because scatter_add adds in any order on a GPU.
    member_btd = documents_bt[:, :, None] == torch.arange(2 * pairs, device=documents_bt.device)
    return (values_bt[:, :, None] * member_btd).sum(dim=1).view(-1, pairs, 2)


def dpo_losses(ratios_n2: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """-log σ(β · (chosen - rejected)); with smoothing a pair is the wrong way round with that probability."""
    margin_n = beta * (ratios_n2[:, 0] - ratios_n2[:, 1])
    return -(1 - label_smoothing) * F.logsigmoid(margin_n) - label_smoothing * F.logsigmoid(-margin_n)


def ipo_losses(ratios_n2: Tensor, tokens_n2: Tensor, beta: float) -> Tensor:
    """(chosen - rejected - 1 / 2β)², of log-ratios per token.

    The paper writes sums. Its authors used means, as TRL does: sums would make long answers outweigh all others.
    """
    mean_n2 = ratios_n2 / tokens_n2.clamp(min=1)
    return (mean_n2[:, 0] - mean_n2[:, 1] - 1 / (2 * beta)) ** 2


def kto_losses(ratios_n: Tensor, wanted_n: Tensor, kl: Tensor, config: PreferenceConfig) -> Tensor:
    """λ · (1 - σ(β · (ratio - KL))) for a wanted answer, λ · (1 - σ(β · (KL - ratio))) for an unwanted one."""
    above_n = config.beta * (ratios_n - kl)
    wanted = config.desirable_weight * torch.sigmoid(-above_n)
    return torch.where(wanted_n, wanted, config.undesirable_weight * torch.sigmoid(above_n))


class PreferenceObjective(Objective):
    """The mean loss of pairs (dpo, ipo) or of labelled answers (kto)."""

    def __init__(self, config: PreferenceConfig, reference: Reference) -> None:
        self._config, self._reference = config, reference
        names = ("reward_chosen", "reward_rejected", "reward_margin")
        self.metric_names = (*names, "kl" if config.method == "kto" else "reward_accuracy")
        self.sum_count = 6

    def count(self, batch: Batch) -> int:
        """Pairs, or labelled answers."""
        assert batch.labels is not None, "rows of preference data have labels"
        return int((batch.labels >= 0).sum())

    def sums(self, call: ModelCall, batch: Batch) -> Tensor:
        """Losses; number and sum of rewards of wanted and of unwanted answers; the last metric's sum and number."""
        assert batch.labels is not None
        assert batch.documents is not None
        reference_bt = self._reference.token_losses(call, batch)
        losses_bt = call(batch, each_loss=True)
        documents_bt, targets_bt, labels_bk = (
            torch.from_numpy(array).to(losses_bt.device)
            for array in (batch.documents, batch.targets != IGNORE_INDEX, batch.labels)
        )
        labels_n, pairs = labels_bk.flatten(), labels_bk.shape[1]
        # Losses are negative log-probabilities.
        ratios_n2 = pair_sums(reference_bt - losses_bt, documents_bt, pairs).flatten(0, 1)
        if self._config.method == "kto":
            return self._labelled_sums(ratios_n2, labels_n)
        tokens_n2 = pair_sums(targets_bt, documents_bt, pairs).flatten(0, 1)
        return self._paired_sums(ratios_n2, tokens_n2, labels_n >= 0)

    def _paired_sums(self, ratios_n2: Tensor, tokens_n2: Tensor, there_n: Tensor) -> Tensor:
        config = self._config
        if config.method == "ipo":
            losses_n = ipo_losses(ratios_n2, tokens_n2, config.beta)
        else:
            losses_n = dpo_losses(ratios_n2, config.beta, config.label_smoothing)
        chosen_n, rejected_n = (config.beta * ratios_n2.detach()).unbind(dim=1)
        # Pairs that are not there have rewards of 0, so that only their losses must be left out.
        terms = (losses_n.where(there_n, 0.0), there_n, chosen_n, there_n, rejected_n, chosen_n > rejected_n, there_n)
        return torch.stack([term.float().sum() for term in terms])

    def _labelled_sums(self, ratios_n2: Tensor, labels_n: Tensor) -> Tensor:
        there_n, wanted_n, unwanted_n = labels_n >= 0, labels_n == 1, labels_n == 0
        # An estimate over the micro batch, as in the paper: no process has to wait for another.
        kl = (ratios_n2[:, 1].detach().sum() / there_n.sum().clamp(min=1)).clamp(min=0)
        losses_n = kto_losses(ratios_n2[:, 0], wanted_n, kl, self._config)
        rewards_n = self._config.beta * ratios_n2[:, 0].detach()
        rewards = (wanted_n, rewards_n * wanted_n, unwanted_n, rewards_n * unwanted_n)
        terms = (losses_n.where(there_n, 0.0), *rewards, kl * there_n, there_n)
        return torch.stack([term.float().sum() for term in terms])

    def metrics(self, sums: Tensor) -> Tensor:
        """Mean rewards of wanted and unwanted answers, their difference, and the accuracy or the KL estimate."""
        chosen, rejected, last = sums[1] / sums[0], sums[3] / sums[2], sums[4] / sums[5]
        return torch.stack([chosen, rejected, chosen - rejected, last])
