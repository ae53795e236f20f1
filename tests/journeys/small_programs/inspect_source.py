import inspect


class A:
    """Doc."""

    def method(self):
        for i in range(3):
            yield i


def f(a, /, b: int = 3, *args, c, **kw) -> str:
    # comment
    for i in range(3):
        pass
    return lambda x: [y for y in x]


print(inspect.getsource(A), inspect.getsource(f), inspect.getsource(f(1, c=2)), inspect.getsource(A.method))
print(inspect.signature(f), inspect.getsourcelines(f), inspect.getcomments(f), inspect.getdoc(A))
print(inspect.getfile(A) == __file__, inspect.getmodule(A).__name__, inspect.getsourcefile(f) == __file__)
print(f.__code__.co_firstlineno, f.__code__.co_qualname)
