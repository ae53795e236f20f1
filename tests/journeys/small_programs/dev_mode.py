# env: PYTHONDEVMODE=1
import sys

print(sys.flags.dev_mode, sys.warnoptions)
for i in range(2):
    print(i)
