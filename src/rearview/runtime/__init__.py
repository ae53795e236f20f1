"""Inside the user's process."""
