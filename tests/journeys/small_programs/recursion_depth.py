def depth(n):
    try:
        return depth(n + 1)
    except RecursionError:
        return n


print(depth(0))
for i in range(2):
    print(depth(0))
