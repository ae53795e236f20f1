"""NumPy alone."""

import numpy as np

rng = np.random.default_rng()
x, y = rng.standard_normal((4096, 256)), rng.integers(10, size=4096)
w1, w2 = rng.standard_normal((256, 256)) * 0.05, rng.standard_normal((256, 10)) * 0.05
for epoch in range(40):
    order = rng.permutation(len(x))
    for at in range(0, len(x), 64):
        chosen = order[at : at + 64]
        hidden = np.maximum(x[chosen] @ w1, 0)
        p = np.exp(hidden @ w2)
        p /= p.sum(1, keepdims=True)
        p[np.arange(len(chosen)), y[chosen]] -= 1
        back = (p @ w2.T) * (hidden > 0)
        w2 -= 0.001 * hidden.T @ p
        w1 -= 0.001 * x[chosen].T @ back
        # INNER float(np.abs(p).mean())
    # OUTER float(np.linalg.norm(w1))
