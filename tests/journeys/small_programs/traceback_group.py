def fail(n):
    for i in range(n):
        if i == n - 1:
            raise ValueError(n)


found = []
for n in (1, 2, 3):
    try:
        fail(n)
    except ValueError as exc:
        found.append(exc)
try:
    raise ExceptionGroup("several", [*found, ExceptionGroup("inner", [KeyError("x")])])
except* KeyError as group:
    print("caught", group.exceptions)
