"""Run the cells of notebooks and scripts: execute them, record their inputs, reuse their stored results."""
