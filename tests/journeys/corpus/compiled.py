"""torch.compile on a small model (eager backend: no compiler is needed), and a compiled function."""
import torch
from torch import nn
# use: import rearview

torch.manual_seed(17)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
fast = torch.compile(model, backend="eager")


@torch.compile(backend="eager")
def penalty(weights):
    total = 0.0
    for w in weights:
        total = total + w.square().sum()
    return total


opt = torch.optim.Adam(model.parameters(), lr=0.02)
X, Y = torch.randn(32, 4), torch.randn(32, 1)
for epoch in range(5):
    for i in range(0, 32, 8):
        loss = (fast(X[i : i + 8]) - Y[i : i + 8]).pow(2).mean() + 1e-3 * penalty([p for p in model.parameters()])
        opt.zero_grad()
        loss.backward()
        opt.step()
        # inner: rearview.log("loss", loss.item())
    # outer: rearview.log("w", model[0].weight.sum().item())
