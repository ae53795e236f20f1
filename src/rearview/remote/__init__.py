"""Other places for bytes: one protocol of five methods, whatever stands behind it."""
