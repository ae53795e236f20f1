def first(n):
    for i in range(n):
        yield from second(i)


def second(i):
    while i:
        yield i
        i -= 1
        if i == 1:
            raise LookupError("one")


total = sum(x for x in first(4) if x)
