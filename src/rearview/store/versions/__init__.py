"""The source of every run, stored as git trees under refs that belong to Rearview."""
