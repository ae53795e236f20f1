"""A WGAN-like loop: `it = iter(loader)` outside, next() with StopIteration caught, five critic steps."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
# use: import rearview

torch.manual_seed(3)
loader = DataLoader(TensorDataset(torch.randn(40, 2)), batch_size=7, shuffle=True)
critic, gen = nn.Linear(2, 1), nn.Linear(2, 2)
opt_c = torch.optim.RMSprop(critic.parameters(), lr=5e-3)
opt_g = torch.optim.RMSprop(gen.parameters(), lr=5e-3)
data_iter = iter(loader)
passes = 0
for gen_iteration in range(12):
    for j in range(3):
        try:
            (real,) = next(data_iter)
        except StopIteration:
            data_iter = iter(loader)
            passes += 1
            (real,) = next(data_iter)
        for p in critic.parameters():
            p.data.clamp_(-0.1, 0.1)
        loss_c = critic(gen(torch.randn(len(real), 2)).detach()).mean() - critic(real).mean()
        opt_c.zero_grad()
        loss_c.backward()
        opt_c.step()
        # inner: rearview.log("critic", loss_c.item())
    loss_g = -critic(gen(torch.randn(8, 2))).mean()
    opt_g.zero_grad()
    loss_g.backward()
    opt_g.step()
    # outer: rearview.log("passes", passes)
    # outer: rearview.log("g", loss_g.item())
# after: rearview.log("w", critic.weight.sum().item())
