import functools


def retry(times):
    def wrap(function):
        @functools.wraps(function)
        def call(*args):
            for attempt in range(times):
                try:
                    return function(*args)
                except ValueError:
                    if attempt == times - 1:
                        raise

        return call

    return wrap


@retry(3)
def f(x):
    for i in range(x):
        raise ValueError(i)


print(f.__name__, f.__wrapped__.__code__.co_firstlineno)
f(2)
