import signal


class Late(Exception):
    pass


def handle(number, frame):
    raise Late("late")


signal.signal(signal.SIGALRM, handle)
signal.setitimer(signal.ITIMER_REAL, 0.05)
count = 0
try:
    while True:
        count += 1
except Late as exc:
    print("interrupted", exc, count > 0)
