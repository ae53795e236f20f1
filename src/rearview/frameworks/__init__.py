"""Callbacks for training frameworks; they use only the public API of Rearview."""
