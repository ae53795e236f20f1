import os
import signal
import sys

signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
try:
    for i in range(3):
        os.kill(os.getpid(), signal.SIGTERM)
finally:
    print("cleaned", i)
