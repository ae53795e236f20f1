import os
import signal

for i in range(3):
    print(i, flush=True)
    if i:
        os.kill(os.getpid(), signal.SIGKILL)
