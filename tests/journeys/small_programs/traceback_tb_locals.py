import traceback


def f(n):
    for i in "abcd":
        total = i
        if i == "c":
            raise ValueError(i)


try:
    f(4)
except ValueError as exc:
    print("".join(traceback.TracebackException.from_exception(exc.with_traceback(exc.__traceback__.tb_next), capture_locals=True).format()))
