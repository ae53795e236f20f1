"""Cells of notebooks and scripts, in the process that runs them: execute them, record their inputs, reuse results."""
