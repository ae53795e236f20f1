import sys


def f(depth):
    return sys._getframe(depth).f_code.co_name


for i in range(2):
    print(f(i))
try:
    print(f(2))
except ValueError as exc:
    print(exc)
print(sys._getframe().f_globals is globals(), sys._getframe().f_locals is globals(), sys._getframe().f_back)
