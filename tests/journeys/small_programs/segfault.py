import ctypes
import sys

print("before", flush=True)
for i in range(3):
    ctypes.string_at(0)
