import sys
import traceback


def hook(kind, value, trace):
    print("hook", kind.__name__, value, [f.name for f in traceback.extract_tb(trace)], trace.tb_lineno)
    sys.__excepthook__(kind, value, trace)


sys.excepthook = hook


def f(n):
    for i in range(n):
        if i == 2:
            raise ValueError(i)


f(5)
