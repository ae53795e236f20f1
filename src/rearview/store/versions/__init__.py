"""The source of every run, as git trees under our own refs."""
