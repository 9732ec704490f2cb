# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Every access to non-public Lightning, one function a seam, named after what it gives.

Each one stands on functions that the contracts pin, so it needs no defence of its own: where Lightning changed, the
contract check has already said so and nobody asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import lightning

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.core.optimizer import LightningOptimizer


def installed_version() -> str:
    """Return the release of the Lightning in this process."""
    return str(lightning.__version__)


def loops(trainer: Trainer) -> Iterator[tuple[str, object, type]]:
    """Yield the three loops of automatic optimization: where they hang, the object, the inspected type."""
    from lightning.pytorch.loops.fit_loop import _FitLoop
    from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

    fit_loop = trainer.fit_loop
    yield "trainer.fit_loop", fit_loop, _FitLoop
    epoch_loop = fit_loop.epoch_loop
    yield "trainer.fit_loop.epoch_loop", epoch_loop, _TrainingEpochLoop
    automatic = epoch_loop.automatic_optimization
    yield "trainer.fit_loop.epoch_loop.automatic_optimization", automatic, _AutomaticOptimization


def step_objects(trainer: Trainer) -> Iterator[tuple[str, object, bool]]:
    """Yield the objects that take part in a step: where they hang, the object, whether a subclass may override.

    Overriding is Lightning's own way to extend a strategy, a precision plugin, a profiler or a module: whoever meets
    such an override judges it. The others are Lightning's alone.
    """
    yield "trainer", trainer, False
    for where, loop, _ in loops(trainer):
        yield where, loop, False
    for index, optimizer in enumerate(lightning_optimizers(trainer)):
        yield f"trainer.strategy._lightning_optimizers[{index}]", optimizer, False
    yield "trainer.strategy", trainer.strategy, True
    yield "trainer.precision_plugin", trainer.strategy.precision_plugin, True
    yield "trainer.profiler", trainer.profiler, True  # type: ignore[attr-defined]
    module = trainer.strategy.lightning_module
    if module is not None:
        yield "trainer.lightning_module", module, True


def lightning_optimizers(trainer: Trainer) -> list[LightningOptimizer]:
    """Return Lightning's wrappers of the optimizers; empty before the strategy was set up."""
    return list(trainer.strategy._lightning_optimizers)


def is_last_of_several(trainer: Trainer) -> bool:
    """Tell whether the current batch ends an epoch of more than one: the place of a ragged batch."""
    return bool(trainer.is_last_batch) and trainer.fit_loop.epoch_loop.batch_idx > 0


def has_optimizer(trainer: Trainer) -> bool:
    """Tell whether ``configure_optimizers`` gave an optimizer, and not Lightning's stand-in for none."""
    from lightning.pytorch.core.optimizer import _MockOptimizer

    return any(not isinstance(optimizer, _MockOptimizer) for optimizer in trainer.optimizers)


def is_compiled(module: LightningModule) -> bool:
    """Tell whether the LightningModule itself went through ``torch.compile``."""
    return getattr(module, "_compiler_ctx", None) is not None


def takes_dataloader_iter(module: LightningModule) -> bool:
    """Tell whether ``training_step`` fetches its batches itself."""
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

    return bool(is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True))


def has_own_hook(owner: object, hook: str, parent: type) -> bool:
    """Tell whether a hook differs from its parent class's, set on the object included.

    Lightning's own ``is_overridden`` fails on callables without code, such as ``LambdaCallback(on_...=print)``.

    Args:
        owner: A module, callback or plugin.
        hook: The hook's name.
        parent: The Lightning class that defines it.
    """
    method = getattr(owner, hook, None)
    return getattr(method, "__func__", method) is not getattr(parent, hook)
