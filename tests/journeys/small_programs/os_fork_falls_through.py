import os
import sys

pid = os.fork()
if pid:
    os.waitpid(pid, 0)
for i in range(3):
    print("parent" if pid else "child", i)
with open("child.txt" if pid == 0 else "parent.txt", "w") as file:
    file.write("done")
