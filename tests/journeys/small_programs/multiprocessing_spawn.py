import multiprocessing as mp
import sys

print("top", __name__, sys.argv[0].rpartition("/")[2], sys.flags.safe_path, flush=True)


class Thing:
    def __init__(self, x):
        self.x = x


def work(thing):
    for i in range(2):
        thing.x += 1
    return thing, __name__, thing.__class__.__module__, sys.flags.safe_path


if __name__ == "__main__":
    with mp.get_context("spawn").Pool(1) as pool:
        for thing, name, module, safe in pool.map(work, [Thing(1), Thing(5)]):
            print(thing.x, name, module, isinstance(thing, Thing), safe)
        pool.close()
        pool.join()
