"""The command line: parses, calls history, shows what comes back."""
