import traceback


def f(x):
    return [1 / y for y in x]


for source in ([1, 0], [2]):
    try:
        print(f(source), {k: 1 // k for k in source}, {1 % k for k in source})
    except ZeroDivisionError:
        traceback.print_exc()
print([[1 / (j - i) for j in range(3)] for i in range(3)])
