"""Callbacks and loggers: Lightning, Keras and Hugging Face log to Rearview, through its public API only."""
