import os
import signal


def handle(number, frame):
    print("got", signal.Signals(number).name, frame.f_code.co_name, frame.f_lineno)


def loop():
    for name in ("SIGUSR1", "SIGUSR2", "SIGTERM", "SIGINT", "SIGHUP"):
        signal.signal(getattr(signal, name), handle)
        os.kill(os.getpid(), getattr(signal, name))


loop()
print(signal.getsignal(signal.SIGCHLD), signal.getsignal(signal.SIGPIPE))
print(signal.pthread_sigmask(signal.SIG_BLOCK, []))
