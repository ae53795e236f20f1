"""A trainer whose state only its methods know: closures of a class made in a function."""
import functools

import torch
# use: import rearview


def remembered(function):
    last = []

    @functools.wraps(function)
    def wrapper(self, *args):
        last.append(function(self, *args))
        return sum(last[-3:])

    return wrapper


def make():
    weight, velocity = torch.randn(4), torch.zeros(4)
    count = 0

    class Base:
        @staticmethod
        def pull(gradient):
            velocity.mul_(0.9).sub_(0.05 * gradient)
            weight.add_(velocity)

    class Trainer(Base):
        @property
        def seen(self):
            return count

        @remembered
        def step(self, x, y):
            nonlocal count
            count += 1
            error = x @ weight - y
            self.pull(x.T @ error / len(x))
            return error.pow(2).mean().item()

        def __call__(self):
            return weight.norm().item()

    return Trainer()


torch.manual_seed(21)
trainer = make()
X = torch.randn(40, 4)
Y = X.sum(1)
for epoch in range(6):
    for i in range(0, 40, 8):
        loss = trainer.step(X[i : i + 8], Y[i : i + 8])
        # inner: rearview.log("loss", loss)
    # outer: rearview.log("norm", trainer())
    # outer: rearview.log("seen", trainer.seen)
# after: rearview.log("total", trainer() + loss)
