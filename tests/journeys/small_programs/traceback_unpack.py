import traceback

for source in ([1], [(1, 2, 3)], [()], ["a"], [None]):
    try:
        for a, b in source:
            print(a, b)
    except (TypeError, ValueError):
        traceback.print_exc()
for a, *b in [(1, 2, 3), "xyz", [4]]:
    print(a, b)
for [a, (b, c)], d in [((1, (2, 3)), 4)]:
    print(a, b, c, d)
for a, *b in [()]:
    pass
