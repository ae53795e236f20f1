"""Long preparation, then a short training: what replays cost when set-up is most of it."""

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(4)
mix = torch.randn(400, 400)
features = torch.randn(4000, 400)
for _ in range(150):
    features = torch.tanh(features @ mix * 0.05)
target = features[:, :1].clone()
model = nn.Sequential(nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 1))
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(25):
    for xb, yb in zip(features.split(250), target.split(250)):
        loss = nn.functional.mse_loss(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # INNER loss.item()
    # OUTER model[0].weight.norm().item()
