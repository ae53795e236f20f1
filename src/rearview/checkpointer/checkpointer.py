"""The published home of the class: `from checkpointer.checkpointer import Checkpointer`."""

from rearview import Checkpointer

__all__ = ["Checkpointer"]
