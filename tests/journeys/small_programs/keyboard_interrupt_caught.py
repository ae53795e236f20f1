import os
import signal

for i in range(4):
    try:
        while True:
            os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt as exc:
        print("caught", i, repr(exc))
        if i == 2:
            raise SystemExit(130)
