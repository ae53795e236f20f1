"""python-fire on a class: `train` and its keyword arguments come from the command line."""
# run: fire_like.py train --epochs=4 --lr=0.1
import fire
import numpy as np
# use: import rearview


class Experiment:
    def __init__(self, seed=0):
        self.rng = np.random.default_rng(seed)
        self.weights = self.rng.normal(size=5)
        self.log = []

    def train(self, epochs=2, lr=0.01):
        for epoch in range(epochs):
            for batch in self.rng.normal(size=(6, 8, 5)):
                error = batch @ self.weights - batch[:, 0]
                self.weights -= lr * batch.T @ error / len(batch)
                # inner: rearview.log("error", float((error**2).mean()))
            self.log.append(self.weights.copy())
            # outer: rearview.log("w", float(self.weights.sum()))
        # after: rearview.log("rows", len(self.log))


if __name__ == "__main__":
    fire.Fire(Experiment)
