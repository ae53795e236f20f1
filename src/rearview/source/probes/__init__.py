"""Find the log statements that an edit adds to a recorded source, or the reasons to refuse the edit."""
