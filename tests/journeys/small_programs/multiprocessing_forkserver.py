import multiprocessing as mp


def work(x):
    return [i * x for i in range(3)], __name__


if __name__ == "__main__":
    context = mp.get_context("forkserver")
    with context.Pool(1) as pool:
        print(pool.map(work, range(3)))
