import sys

try:
    for i in range(3):
        raise ValueError(i)
finally:
    sys.exit(4)
