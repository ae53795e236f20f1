import os
import sys

sys.stdout = os.fdopen(1, "w", 1)
for i in range(3):
    print(i)
saved = os.dup(1)
with open("moved.txt", "w") as file:
    os.dup2(file.fileno(), 1)
    print("in the file")
    sys.stdout.flush()
    os.dup2(saved, 1)
print("back")
