# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Whether a fit as a whole can be replayed."""

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision

from lightning_replay.compat import seams
from lightning_replay.reasons import Finding, Reason


def find_fit_reason(trainer: Trainer, module: LightningModule) -> Finding | None:
    """Finds why every step of a fit has to be native.

    Args:
        trainer: The trainer, at its first training step.
        module: The model it trains.
    """
    name = type(module).__name__
    if not module.automatic_optimization:
        return Finding(Reason.MANUAL_OPTIMIZATION, f"{name}.automatic_optimization", "True", "False")
    if not seams.has_optimizer(trainer):
        return Finding(Reason.NO_OPTIMIZER, f"{name}.configure_optimizers", "an optimizer", "none")
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in trainer.optimizers):
        return Finding(Reason.OPTIMIZER, f"{name}.configure_optimizers", "one closure a step", "LBFGS")
    if torch.is_anomaly_enabled():
        return Finding(Reason.DETECT_ANOMALY, "Trainer(detect_anomaly=...)", "False", "True")
    if seams.is_compiled(module):
        return Finding(Reason.COMPILED_MODULE, name, "a LightningModule that is not compiled", "torch.compile(module)")
    if seams.takes_dataloader_iter(module):
        return Finding(Reason.DATALOADER_ITER, f"{name}.training_step", "batch", "dataloader_iter")
    if seams.has_own_hook(module, "backward", LightningModule):
        return Finding(Reason.OVERRIDDEN_BACKWARD, f"{name}.backward", "Lightning's own", "an override")
    if seams.has_own_hook(trainer.precision_plugin, "backward", Precision):
        plugin = type(trainer.precision_plugin).__name__
        return Finding(Reason.OVERRIDDEN_BACKWARD, f"{plugin}.backward", "Lightning's own", "an override")
    return None
