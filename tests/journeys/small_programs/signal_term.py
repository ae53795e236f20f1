import os
import signal

for i in range(3):
    print(i, flush=True)
    if i == 1:
        os.kill(os.getpid(), signal.SIGTERM)
