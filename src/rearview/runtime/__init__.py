"""Inside the user's process: record, resume or replay the program."""
