# shell: $RUN $PWD/absolute_path.py
import sys

print(__file__, sys.argv)
for i in range(1):
    raise ValueError(i)
