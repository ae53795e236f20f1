"""Every way to leave a loop: break, continue, else, return, exceptions, try/finally, nested."""
import math
import random
# use: import rearview

random.seed(4)


class Diverged(Exception):
    pass


def inner(epoch, scale):
    total = 0.0
    for i in range(10):
        if i == 2 and epoch % 2:
            continue
        try:
            value = random.gauss(0, scale)
            if value > 3 * scale:
                raise Diverged(value)
            if i == 7 and epoch == 3:
                return total
            if value < -1.5 * scale:
                break
        except Diverged:
            total -= 1
            continue
        finally:
            total += 0.125
        total += math.tanh(value)
        # inner: rearview.log("total", total)
    else:
        total += 100
    return total


def search(limit):
    for a in range(limit):
        for b in range(limit):
            if a * b == 12:
                break
        else:
            continue
        break
    return a, b


state, scale = [], 1.0
for epoch in range(12):
    got = inner(epoch, scale)
    state.append(got)
    n = 0
    while n < 5:
        n += 1
        if random.random() < 0.2:
            break
    else:
        scale *= 1.1
    if epoch == 5:
        scale = 0.5
        continue
    # outer: rearview.log("scale", scale)
    # outer: rearview.log("n", n)
print(search(8), sum(state))
# after: rearview.log("sum", sum(state))
