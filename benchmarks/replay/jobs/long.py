"""Many epochs of about two seconds."""

import sys

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)
epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 200
x, y = torch.randn(2048, 256), torch.randint(10, (2048,))
model = nn.Sequential(
    nn.Linear(256, 768),
    nn.ReLU(),
    nn.Dropout(0.1),
    nn.Linear(768, 768),
    nn.ReLU(),
    nn.Linear(768, 10),
)
optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
for epoch in range(epochs):
    for step in range(150):
        chosen = torch.randint(len(x), (256,))
        loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # INNER loss.item()
    # OUTER model[0].weight.norm().item()
