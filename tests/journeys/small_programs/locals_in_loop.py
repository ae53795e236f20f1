def f(n):
    for i in range(n):
        x = i * 2
        print(locals())
    while n:
        n -= 1
        print(sorted(vars()), dir())
    return locals()


print(f(2))
for i in range(2):
    for j in "ab":
        pass
print(sorted(name for name in globals() if name not in ("__annotations__",)))
print(sorted(locals()) == sorted(vars()) == dir())
