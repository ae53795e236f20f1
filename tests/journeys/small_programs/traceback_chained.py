def a():
    for i in range(2):
        raise KeyError("a")


def b():
    try:
        a()
    except KeyError as exc:
        for i in range(2):
            raise ValueError("b") from exc


def c():
    try:
        b()
    except ValueError:
        while True:
            raise TypeError("c")


def d():
    try:
        c()
    except TypeError:
        raise RuntimeError("d") from None


for f in (c, d):
    try:
        f()
    except Exception as exc:
        import traceback
        traceback.print_exc()
c()
