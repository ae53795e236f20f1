"""The Lightning callback of the published `checkpointer` package, under both names that the package gives it.

::

    checkpointer = LightningCheckpointCallback(local_checkpoint_file="run.ckpt", checkpoint_every=1)
    trainer = Trainer(callbacks=[checkpointer])
    trainer.fit(model, loader, ckpt_path=checkpointer.restore())
"""

from __future__ import annotations

import os
from typing import Any

from rearview.checkpointer.destination_and_interval import Epochs
from rearview.frameworks.lightning import RearviewCallback

__all__ = ["LightningCheckpointCallback", "LightningCheckpointerCallback"]


class LightningCheckpointCallback(RearviewCallback):
    """`RearviewCallback` with the arguments of the published class: `checkpoint_every` counts epochs.

    After a signal, the callback saves and exits before the next batch.
    """

    def __init__(
        self,
        local_checkpoint_file: str | os.PathLike[str],
        checkpoint_every: Any = 10,
        **checkpointer: Any,
    ) -> None:
        self._epochs = Epochs.of(checkpoint_every)
        super().__init__(local_checkpoint_file, **checkpointer, checkpoint_every=self._epochs)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Remember whether the current epoch gets a save; if so, the next step makes the save."""
        if isinstance(self._epochs, Epochs):
            self._epochs.begin(trainer.current_epoch)

    def restore(self) -> None:
        """Return None, for `ckpt_path` of Lightning: the callback itself restores the training at the exact batch."""


LightningCheckpointerCallback = LightningCheckpointCallback
