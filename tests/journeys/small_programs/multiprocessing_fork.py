import multiprocessing as mp
import os
import sys


def work(x):
    total = 0
    for i in range(x):
        total += i
    return total, __name__, len(sys.argv)


if __name__ == "__main__":
    context = mp.get_context("fork")
    with context.Pool(2) as pool:
        for answer in pool.map(work, range(4)):
            print(answer)
    queue = context.Queue()
    for i in range(3):
        child = context.Process(target=queue.put, args=(i,), name=f"child{i}")
        child.start()
        print(queue.get(), child.name)
        child.join()
        print(child.exitcode)
