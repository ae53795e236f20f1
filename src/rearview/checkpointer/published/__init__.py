"""A folder for the path: holds the top-level package `checkpointer`."""
