"""The program's view of the outside: random bytes, clock, environment, files, output."""
