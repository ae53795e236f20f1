"""The output of the commands: texts, tables, progress, and the cells of notebooks."""
