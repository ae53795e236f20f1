"""What an edit adds, or why it is refused."""
