class Odd:
    def __bool__(self):
        raise ValueError("neither")


def f(x):
    n = 0
    while n < 3 and x:
        n += 1


f(Odd())
