"""Early stopping that writes best.pt and reads it again, also in the middle (restart from best)."""
import os

import torch
from torch import nn
# use: import rearview

torch.manual_seed(6)
os.makedirs("checkpoints", exist_ok=True)
PATH = os.path.join("checkpoints", "best.pt")
x = torch.randn(60, 4)
y = x.sum(1, keepdim=True).sin()


class EarlyStopping:
    def __init__(self, patience=3):
        self.patience, self.counter, self.best, self.early_stop = patience, 0, None, False

    def __call__(self, val, model):
        if self.best is None or val < self.best:
            self.best, self.counter = val, 0
            torch.save({"model": model.state_dict(), "val": val}, PATH)
        else:
            self.counter += 1
            self.early_stop = self.counter >= self.patience


model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.9, momentum=0.9)
stopping = EarlyStopping()
for epoch in range(12):
    for i in torch.randperm(40).split(8):
        loss = (model(x[i]) - y[i]).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        # inner: rearview.log("loss", loss.item())
    val = (model(x[40:]) - y[40:]).pow(2).mean().item()
    stopping(val, model)
    if stopping.counter == 2:
        model.load_state_dict(torch.load(PATH)["model"])
        for group in opt.param_groups:
            group["lr"] *= 0.5
    # outer: rearview.log("weight", model[0].weight.norm().item())
    if stopping.early_stop:
        break
model.load_state_dict(torch.load(PATH)["model"])
with open("result.txt", "w") as f:
    f.write(f"{stopping.best}\n")
# after: rearview.log("best_weight", model[2].weight.norm().item())
