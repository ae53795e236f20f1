"""A recurrent net whose hidden state is carried from batch to batch."""

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(3)
text = torch.randint(60, (16, 1600))
embed, cell, head = nn.Embedding(60, 64), nn.LSTM(64, 128, batch_first=True), nn.Linear(128, 60)
params = [*embed.parameters(), *cell.parameters(), *head.parameters()]
optimizer = torch.optim.Adam(params)
for epoch in range(20):
    hidden = None
    for at in range(0, 1560, 40):
        x, y = text[:, at : at + 40], text[:, at + 1 : at + 41]
        out, hidden = cell(embed(x), hidden)
        hidden = tuple(h.detach() for h in hidden)
        loss = nn.functional.cross_entropy(head(out).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # INNER loss.item()
    # OUTER hidden[0].norm().item()
