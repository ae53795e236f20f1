def outer(n):
    for i in range(n):
        for j in [1, 2]:
            while True:
                inner(i, j)
                break


def inner(i, j):
    for k in range(3):
        if (i, j, k) == (1, 2, 1):
            raise RuntimeError(f"{i} {j} {k}")


outer(3)
