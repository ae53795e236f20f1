import atexit
import sys

for i in range(3):
    atexit.register(print, "handler", i)


@atexit.register
class Fails:
    def __init__(self):
        for i in range(3):
            raise ValueError("in a handler")


@atexit.register
class Leaves:
    def __init__(self):
        sys.exit(9)


print("end")
