"""A background logger: the program calls it as usual, and another process makes the calls on the real logger."""
