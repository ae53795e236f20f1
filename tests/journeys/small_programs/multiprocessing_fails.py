import multiprocessing as mp
import sys


def work(x):
    for i in range(3):
        if i == x:
            raise ValueError(i)


def leave(x):
    for i in range(3):
        sys.exit(x)


if __name__ == "__main__":
    context = mp.get_context("fork")
    for target, x in ((work, 1), (leave, 5), (leave, None), (leave, "text")):
        child = context.Process(target=target, args=(x,), name=f"{target.__name__} {x}")
        child.start()
        child.join()
        print(child.exitcode, flush=True)
    with context.Pool(1) as pool:
        print(pool.map(work, [5, 1]))
