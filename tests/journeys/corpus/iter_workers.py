"""Infinite training by steps: `it = iter(loader)` with forked workers that augment, next() in the loop."""
import torch
from torch import nn

# use: import rearview


class Augmented(torch.utils.data.Dataset):
    def __init__(self, count):
        self.x = torch.randn(count, 5)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i] + 0.1 * torch.randn(5), self.x[i].sum()


loader = torch.utils.data.DataLoader(
    Augmented(20), batch_size=5, shuffle=True, num_workers=2, multiprocessing_context="fork"
)
net = nn.Linear(5, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
it = iter(loader)
for step in range(10):
    try:
        x, y = next(it)
    except StopIteration:
        it = iter(loader)
        x, y = next(it)
    # outer: rearview.log("batch_mean", x.mean().item())
    for part in range(2):
        loss = (net(x[part::2]).squeeze(1) - y[part::2]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # inner: rearview.log("part_loss", loss.item())
final = sum(p.sum().item() for p in net.parameters())
# after: rearview.log("final", final)
print(final)
