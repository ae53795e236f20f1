# shell: $RUN stdout_mixed.py 2>&1
import os
import sys

for i in range(3):
    print("out", i)
    print("err", i, file=sys.stderr)
    os.write(1, b"low\n")
    sys.stdout.flush()
