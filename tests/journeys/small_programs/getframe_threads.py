import sys
import threading


def names():
    frame = sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_name
        frame = frame.f_back


def work():
    for i in range(1):
        print(list(names()))


t = threading.Thread(target=work)
t.start()
t.join()
print(list(names()), len(sys._current_frames()) >= 1)
