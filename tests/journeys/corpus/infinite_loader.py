"""Diffusion-style training: `cycle(loader)` feeds a single step loop through next(); EMA by hand."""
import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
# use: import rearview

torch.manual_seed(0)


def cycle(dl):
    while True:
        for data in dl:
            yield data


class EMA:
    def __init__(self, model, beta):
        self.beta, self.ema_model = beta, copy.deepcopy(model).eval()

    def update(self, model):
        for a, b in zip(self.ema_model.parameters(), model.parameters()):
            a.data.lerp_(b.data, 1 - self.beta)


model = nn.Sequential(nn.Linear(3, 16), nn.SiLU(), nn.Dropout(0.1), nn.Linear(16, 2))
ema = EMA(model, 0.9)
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
dl = cycle(DataLoader(TensorDataset(torch.randn(30, 2)), batch_size=8, shuffle=True))
step, train_num_steps, accumulate = 0, 20, 2
while step < train_num_steps:
    total = 0.0
    for _ in range(accumulate):
        (x,) = next(dl)
        t = torch.rand(len(x), 1)
        noise = torch.randn_like(x)
        loss = (model(torch.cat([x + t * noise, t], 1)) - noise).pow(2).mean() / accumulate
        total += loss.item()
        loss.backward()
        # inner: rearview.log("x", x.sum().item())
    opt.step()
    opt.zero_grad()
    step += 1
    ema.update(model)
    # outer: rearview.log("ema", ema.ema_model[0].weight.sum().item())
# after: rearview.log("end", total)
