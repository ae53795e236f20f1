"""Other places for bytes: one protocol of five methods, and its implementations."""
