"""What the program sees: randomness, clock, environment, files, output."""
