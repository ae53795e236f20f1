import concurrent.futures as futures
import traceback


def work(x):
    for i in range(x):
        if i == 3:
            raise ValueError("three")
    return x


if __name__ == "__main__":
    for kind in (futures.ThreadPoolExecutor, futures.ProcessPoolExecutor):
        with kind(2) as pool:
            print(list(pool.map(work, range(3))))
            found = pool.submit(work, 5)
            print(repr(found.exception()))
            try:
                found.result()
            except ValueError as exc:
                print(traceback.format_exception_only(exc), exc.__cause__ is None)
