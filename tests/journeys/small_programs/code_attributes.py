def f(n):
    total = 0
    for i in range(n):
        total += i
    while total:
        total -= 1
    return total


code = f.__code__
print(code.co_varnames[:2], code.co_argcount, code.co_freevars, code.co_cellvars, code.co_flags)
print(code.co_name, code.co_qualname, code.co_firstlineno, code.co_filename == __file__)
print(sorted({line for _, _, line in code.co_lines() if line}))
