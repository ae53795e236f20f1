"""Data from a generator function, drawn by the for loop itself, with augmentation inside."""
import random

import numpy as np
# use: import rearview

random.seed(1)
np.random.seed(1)
data = np.random.randn(64, 3)
target = data @ np.array([1.0, -2.0, 0.5])


def batches(x, y, size):
    order = list(range(len(x)))
    random.shuffle(order)
    for start in range(0, len(order), size):
        picked = order[start : start + size]
        yield x[picked] + 0.01 * np.random.randn(len(picked), x.shape[1]), y[picked]


def with_weights(source):
    for i, (xb, yb) in enumerate(source):
        yield xb, yb, 1.0 / (1 + i)


w = np.zeros(3)
for epoch in range(8):
    for xb, yb, weight in with_weights(batches(data, target, 8)):
        grad = xb.T @ (xb @ w - yb) / len(xb)
        w -= 0.1 * weight * grad
        # inner: rearview.log("g", float(np.abs(grad).sum()))
    # outer: rearview.log("w", float(w[1]))
# after: rearview.log("w0", float(w[0]))
