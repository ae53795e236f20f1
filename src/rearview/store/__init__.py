"""At rest: objects, checkpoints, records, versions."""
