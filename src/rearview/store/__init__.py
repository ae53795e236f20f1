"""The store, a folder on disk: project, runs, records, inputs of runs; below: checkpoints, versions, SQL tables."""
