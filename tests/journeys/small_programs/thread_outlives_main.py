import atexit
import threading


def work():
    threading.main_thread().join()
    for i in range(3):
        print("thread", i)


atexit.register(print, "at exit")
threading.Thread(target=work).start()
print("main ends")
raise SystemExit(3)
