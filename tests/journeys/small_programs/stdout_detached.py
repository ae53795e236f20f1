import io
import sys

sys.stdout = io.TextIOWrapper(sys.stdout.detach(), encoding="utf-16", line_buffering=True)
for i in range(2):
    print("wide", i)
