"""A folder for `sys.path`: it contains the top-level package `checkpointer`."""
