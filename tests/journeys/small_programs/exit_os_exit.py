import atexit
import os
import sys

atexit.register(print, "never")
print("lost in the buffer")
sys.stderr.write("written\n")
for i in range(3):
    os._exit(7)
