def f(items):
    for item in items:
        pass
    return item


import traceback

try:
    f([])
except UnboundLocalError:
    traceback.print_exc()


def g():
    for x in range(2):
        del x
    print(x)


try:
    g()
except UnboundLocalError:
    traceback.print_exc()
for y in []:
    pass
print(y)
