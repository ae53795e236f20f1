import sys


def hook(*_):
    for i in range(2):
        raise KeyError("in the hook")


sys.excepthook = hook
1 / 0
