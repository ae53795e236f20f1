"""A loop over learning rates and seeds around a training function that returns."""
import itertools

import torch
from torch import nn
# use: import rearview


def train(lr, seed, epochs=4):
    torch.manual_seed(seed)
    model = nn.Linear(3, 1)
    x = torch.randn(32, 3)
    y = x @ torch.tensor([[1.0], [2.0], [-1.0]])
    opt = torch.optim.SGD(model.parameters(), lr=lr)
    for epoch in range(epochs):
        for xb, yb in zip(x.split(8), y.split(8)):
            loss = (model(xb) - yb).square().mean()
            if loss.item() > 100:
                return None
            opt.zero_grad()
            loss.backward()
            opt.step()
        # inner: rearview.log("slope", model.weight[0, 1].item())
    return loss.item()


results = {}
for lr, seed in itertools.product([0.01, 0.1, 0.9], [0, 1]):
    results[lr, seed] = train(lr, seed)
    # outer: rearview.log("done", len(results))
    # outer: rearview.log("last", results[lr, seed])
best = min((v, k) for k, v in results.items() if v is not None)
# after: rearview.log("best_lr", best[1][0])
print(best)
