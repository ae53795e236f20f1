"""Many epochs of three to four seconds, with a state that is small beside the work: a convolutional net."""

import sys

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)
epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 200
x, y = torch.randn(2048, 3, 32, 32), torch.randint(10, (2048,))
model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(64 * 64, 64), nn.ReLU(), nn.Linear(64, 10),
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for epoch in range(epochs):
    for step in range(64):
        chosen = torch.randint(len(x), (64,))
        loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # INNER loss.item()
    # OUTER model[0].weight.norm().item()
