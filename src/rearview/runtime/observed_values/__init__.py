"""Record values that a program does not log with Rearview: variables, parameters, values given to other loggers."""
