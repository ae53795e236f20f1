"""Record values that a program does not log with Rearview: variables, parameters, calls of other loggers."""
