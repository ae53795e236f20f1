"""The source of every run, as git trees under refs of Rearview."""
