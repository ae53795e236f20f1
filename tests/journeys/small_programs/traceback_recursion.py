import sys

sys.setrecursionlimit(200)


def f(n):
    return f(n + 1)


for i in range(2):
    f(0)
