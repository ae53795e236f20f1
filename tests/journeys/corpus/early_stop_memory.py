"""Early stopping with a deep copy of the best state, loaded again at the end."""
import copy

import torch
from torch import nn
# use: import rearview

torch.manual_seed(5)
x = torch.randn(60, 4)
y = (x[:, :1] * 2 - x[:, 1:2] + 0.5 * torch.randn(60, 1)).detach()
model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.Adam(model.parameters(), lr=0.1)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=1, factor=0.5)
best, best_state, wait, patience = float("inf"), None, 0, 3
for epoch in range(50):
    model.train()
    for i in torch.randperm(40).split(8):
        loss = nn.functional.mse_loss(model(x[i]), y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        # inner: rearview.log("batch_loss", loss.item())
    model.eval()
    with torch.no_grad():
        val = nn.functional.mse_loss(model(x[40:]), y[40:]).item()
    plateau.step(val)
    # outer: rearview.log("lr", opt.param_groups[0]["lr"])
    if val < best - 1e-3:
        best, best_state, wait = val, copy.deepcopy(model.state_dict()), 0
    else:
        wait += 1
        if wait >= patience:
            print("stop at", epoch)
            break
model.load_state_dict(best_state)
# after: rearview.log("reloaded", model[0].weight.sum().item())
print(best)
