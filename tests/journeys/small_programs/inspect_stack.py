import inspect


def f():
    for i in range(1):
        for frame in inspect.stack():
            print(frame.function, frame.lineno, frame.code_context, frame.filename == __file__)


f()
print(len(inspect.stack()), inspect.currentframe().f_back, inspect.stack()[-1].filename == __file__)
