"""The main loop runs over an endless generator with islice-like counting and its own epoch count."""
import random

import torch
# use: import rearview

random.seed(7)
torch.manual_seed(7)
items = list(range(20))
model = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.05)


def stream():
    epoch = 0
    while True:
        random.shuffle(items)
        for k in items:
            yield epoch, torch.full((4,), float(k)) + torch.randn(4)
        epoch += 1


stats = {"seen": 0}
for step, (epoch, x) in enumerate(stream()):
    loss = (model(x) - epoch).pow(2).mean() * 1e-3
    opt.zero_grad()
    loss.backward()
    opt.step()
    stats["seen"] += 1
    for part in range(2):
        stats[part] = random.random()
        # inner: rearview.log("r", stats[part])
    # outer: rearview.log("x", x.sum().item())
    if step >= 49:
        break
# after: rearview.log("first", items[0])
