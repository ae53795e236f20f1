"""The Keras callback of the published `checkpointer` package, under both names that the package gives it.

::

    callback = KerasCheckpointerCallback(local_checkpoint_file="checkpoint", checkpoint_every=1)
    model.fit(x, y, epochs=20, callbacks=[callback])
"""

from __future__ import annotations

import os
from typing import Any

from rearview.checkpointer.destination_and_interval import Epochs
from rearview.frameworks.keras import RearviewCallback

__all__ = ["KerasCheckpointCallback", "KerasCheckpointerCallback"]


class KerasCheckpointCallback(RearviewCallback):
    """`RearviewCallback` with the arguments of the published class: `checkpoint_every` counts epochs.

    `save_freq` is `"epoch"`, or a number of batches between saves, which then replaces `checkpoint_every`.
    After a signal, the callback saves and exits at the end of the batch.
    """

    def __init__(
        self,
        local_checkpoint_file: str | os.PathLike[str],
        save_freq: str | int = "epoch",
        checkpoint_every: Any = 10,
        **checkpointer: Any,
    ) -> None:
        every = checkpoint_every if save_freq == "epoch" else None
        self._epochs = Epochs.of(every) if save_freq == "epoch" else save_freq
        super().__init__(local_checkpoint_file, **checkpointer, checkpoint_every=self._epochs)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Remember whether epoch number `epoch` gets a save; if so, the next step makes the save."""
        if isinstance(self._epochs, Epochs):
            self._epochs.begin(epoch)
        super().on_epoch_begin(epoch, logs)


KerasCheckpointerCallback = KerasCheckpointCallback
