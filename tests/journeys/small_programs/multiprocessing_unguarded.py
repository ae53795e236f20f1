import multiprocessing as mp
import os

mp.set_start_method("spawn")


def work():
    os._exit(3)


for i in range(1):
    child = mp.Process(target=work)
    try:
        child.start()
    except RuntimeError as exc:
        print("refused", type(exc).__name__)
        os._exit(4)
    child.join()
    print(child.exitcode)
