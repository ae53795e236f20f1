import os
import sys

for i in range(3):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        for j in range(2):
            print("child", i, j)
        sys.exit(i)
    print("parent", i, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
