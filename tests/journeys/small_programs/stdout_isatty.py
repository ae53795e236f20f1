import os
import sys

print(sys.stdout.isatty(), sys.stdin.isatty(), os.isatty(1), sys.stdout.fileno(), sys.stdout.name, sys.stdout.mode)
print(type(sys.stdout), type(sys.stdout.buffer), sys.stdout.buffer.raw, sys.__stdout__ is sys.stdout)
print(sys.stdout.reconfigure(line_buffering=True), sys.stdout.line_buffering)
