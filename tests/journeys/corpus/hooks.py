"""Forward and backward hooks that gather statistics, removed and added again on the way."""
import torch
from torch import nn
# use: import rearview

torch.manual_seed(9)
model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
stats, handles = {}, []


def watch(name):
    def hook(module, args, output):
        stats.setdefault(name, []).append(output.detach().abs().mean().item())

    return hook


for name, layer in model.named_modules():
    if isinstance(layer, nn.Linear):
        handles.append(layer.register_forward_hook(watch(name)))
model[4].weight.register_hook(lambda g: g * 0.5)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
X, Y = torch.randn(48, 5), torch.randn(48, 1)
for epoch in range(8):
    if epoch == 3:
        handles.pop(0).remove()
    if epoch == 5:
        handles.append(model[0].register_full_backward_hook(lambda m, gi, go: stats.setdefault("back", []).append(go[0].norm().item())))
    for xb, yb in zip(X.split(12), Y.split(12)):
        loss = nn.functional.mse_loss(model(xb), yb)
        model.zero_grad()
        loss.backward()
        opt.step()
        # inner: rearview.log("sizes", sum(len(v) for v in stats.values()))
    # outer: rearview.log("last", stats["2"][-1])
    # outer: rearview.log("back", sum(stats.get("back", [0.0])))
