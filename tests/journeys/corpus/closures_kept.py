"""Functions made in each epoch are kept, and called again when the loops are over."""
import random
# use: import rearview


def train(epochs):
    w, kept = 1.0, []
    for epoch in range(epochs):
        lr = 0.1 / (epoch + 1)
        noise = random.random()

        def gradient(k):
            g = w * lr * k
            # inner: rearview.log("g", g + noise)
            return g

        for k in range(3):
            w -= gradient(k)
        kept.append(gradient)
        # outer: rearview.log("w", w)
    return w, sum(f(1) for f in kept)


random.seed(0)
w, last = train(6)
