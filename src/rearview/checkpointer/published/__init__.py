"""A folder to put on `sys.path`: it contains the module `checkpointer`, importable by the published name."""
