import traceback


def f():
    for i in range(1):
        traceback.print_stack()
        print(traceback.format_stack())


f()
traceback.print_stack()
