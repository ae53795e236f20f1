import contextlib


@contextlib.contextmanager
def manager():
    try:
        yield
    finally:
        print("closed")


def f():
    with manager():
        for i in range(3):
            with contextlib.suppress(KeyError):
                if i == 2:
                    raise ValueError(i)


f()
