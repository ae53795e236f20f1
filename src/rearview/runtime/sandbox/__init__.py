"""What the program sees of the system: random bytes, clock, environment variables, files, output."""
