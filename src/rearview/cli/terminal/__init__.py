"""The output of the commands: text, tables, progress bars, and the output of notebook cells."""
