# env: PYTHONOPTIMIZE=2
"""Doc that goes away."""
import sys


def f():
    """Doc."""
    for i in range(2):
        assert False, "never"
    return f.__doc__


print(__debug__, sys.flags.optimize, f(), __doc__)
