import sys
import time

for i in range(50):
    sys.stderr.write(f"\r{i}/50 {'#' * i}")
    sys.stderr.flush()
sys.stderr.write("\n")
print("\x1b[31mred\x1b[0m\x07\x00")
