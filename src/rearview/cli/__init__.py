"""The command line: parse the arguments, call `History`, show the result."""
