class A:
    for i in range(3):
        exec(f"x{i} = {i}")
    else:
        last = i
    names = sorted(locals())
    while i:
        i -= 1


print(A.names, sorted(vars(A)), A.last)


class B:
    table = {n: [m for m in range(n)] for n in range(3)}
    for key in list(table):
        if key == 1:
            break


print(sorted(vars(B)), B.key)
