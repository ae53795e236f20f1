"""A two-layer network in NumPy alone, with momentum and its own minibatch generator."""
import numpy as np
# use: import rearview

rng = np.random.default_rng(1)
X = rng.normal(size=(120, 5))
y = (X[:, :1] * X[:, 1:2] > 0).astype(float)
params = {"W1": rng.normal(size=(5, 16)) * 0.3, "b1": np.zeros(16), "W2": rng.normal(size=(16, 1)) * 0.3, "b2": np.zeros(1)}
velocity = {k: np.zeros_like(v) for k, v in params.items()}


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def gradients(xb, yb):
    h = np.tanh(xb @ params["W1"] + params["b1"])
    p = sigmoid(h @ params["W2"] + params["b2"])
    d = (p - yb) / len(xb)
    dh = d @ params["W2"].T * (1 - h**2)
    loss = -np.mean(yb * np.log(p + 1e-9) + (1 - yb) * np.log(1 - p + 1e-9))
    return loss, {"W1": xb.T @ dh, "b1": dh.sum(0), "W2": h.T @ d, "b2": d.sum(0)}


lr, losses = 0.5, []
for epoch in range(12):
    order = rng.permutation(len(X))
    for batch in np.array_split(order, 6):
        noise = np.random.standard_normal(X[batch].shape) * 0.01
        loss, grads = gradients(X[batch] + noise, y[batch])
        for k in params:
            velocity[k] = 0.9 * velocity[k] - lr * grads[k]
            params[k] += velocity[k]
        losses.append(loss)
        # inner: rearview.log("g", float(np.linalg.norm(grads["W1"])))
    lr *= 0.95
    # outer: rearview.log("v", float(sum(np.abs(v).sum() for v in velocity.values())))
# after: rearview.log("tail", float(np.mean(losses[-5:])))
