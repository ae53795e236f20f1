"""No library at all: a linear model in pure Python."""

import random

rows = [[random.gauss(0, 1) for _ in range(20)] for _ in range(800)]
truth = [random.gauss(0, 1) for _ in range(20)]
goals = [sum(a * b for a, b in zip(row, truth)) for row in rows]
weights = [0.0] * 20
for epoch in range(100):
    random.shuffle(order := list(range(len(rows))))
    total = 0.0
    for k in order:
        error = sum(a * b for a, b in zip(rows[k], weights)) - goals[k]
        weights = [w - 0.001 * error * a for w, a in zip(weights, rows[k])]
        total += error * error
        # INNER error
    # OUTER total
