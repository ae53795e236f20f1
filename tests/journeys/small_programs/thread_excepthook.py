import sys
import threading

threading.excepthook = lambda args: print("hook", args.exc_type.__name__, args.exc_value, args.thread.name)


def work(n):
    for i in range(n):
        raise KeyError(i)


t = threading.Thread(target=work, args=(2,), name="one")
t.start()
t.join()
