"""The loop over batches lives here, its counter in another module."""
import torch
# use: import rearview

from . import config


def run_epoch(model, opt, loader):
    total = 0.0
    for x, y in loader:
        loss = torch.nn.functional.l1_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        config.step += 1
        total += loss.item()
        # inner: rearview.log("step_loss", loss.item())
    return total / len(loader)
