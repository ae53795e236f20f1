"""Closures with nonlocal, decorators that count, class attributes, a global registry."""
import functools

import torch
# use: import rearview

REGISTRY = {}


def register(cls):
    REGISTRY[cls.__name__] = cls
    return cls


def counted(function):
    calls = 0

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        nonlocal calls
        calls += 1
        wrapper.calls = calls
        return function(*args, **kwargs)

    return wrapper


@register
class Model(torch.nn.Module):
    instances = 0
    norms = []

    def __init__(self):
        super().__init__()
        Model.instances += 1
        self.w = torch.nn.Parameter(torch.randn(4))

    def forward(self, x):
        return x @ self.w


def make_step(model, lr):
    velocity, momentum = torch.zeros(4), 0.9
    total = 0.0

    @counted
    def step(x, y):
        nonlocal velocity, total
        loss = (model(x) - y).pow(2).mean()
        (grad,) = torch.autograd.grad(loss, [model.w])
        velocity = momentum * velocity - lr * grad
        model.w.data += velocity
        total += loss.item()
        # inner: rearview.log("velocity", velocity.norm().item())
        return total

    return step


def main():
    torch.manual_seed(12)
    model = REGISTRY["Model"]()
    step = make_step(model, 0.05)
    X = torch.randn(40, 4)
    Y = X.sum(1)
    for epoch in range(6):
        for i in range(0, 40, 8):
            total = step(X[i : i + 8], Y[i : i + 8])
        Model.norms.append(model.w.norm().item())
        # outer: rearview.log("calls", step.calls)
        # outer: rearview.log("norms", sum(Model.norms))
    return total


if __name__ == "__main__":
    main()
    # after: rearview.log("instances", Model.instances)
