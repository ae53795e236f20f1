"""The command line: parse, ask history, show."""
