import sys

names = sorted(globals())
print(names)
print(__name__, __file__, __doc__, __package__, __spec__, __builtins__)
print(type(__loader__).__name__, __loader__.name, __loader__.path)
print(sys.modules["__main__"].__dict__ is globals(), sys.modules["__main__"])
print(__annotations__)
