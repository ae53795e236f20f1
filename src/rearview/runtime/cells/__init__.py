"""Cells inside the process that runs them: of notebooks, and of scripts that are cut into cells."""
