"""Two nets with two optimizers."""

import torch
from torch import nn

torch.set_num_threads(1)
real = torch.randn(2048, 32) * 0.5 + 1
maker = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 32))
judge = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1))
make, judged = (torch.optim.Adam(net.parameters(), 2e-4) for net in (maker, judge))
loss_of = nn.BCEWithLogitsLoss()
for epoch in range(50):
    for batch in real[torch.randperm(len(real))].split(64):
        fake = maker(torch.randn(len(batch), 16))
        good = loss_of(judge(batch), torch.ones(len(batch), 1))
        bad = loss_of(judge(fake.detach()), torch.zeros(len(batch), 1))
        judged.zero_grad()
        (good + bad).backward()
        judged.step()
        fooled = loss_of(judge(fake), torch.ones(len(batch), 1))
        make.zero_grad()
        fooled.backward()
        make.step()
        # INNER fooled.item()
    # OUTER maker[0].weight.std().item()
