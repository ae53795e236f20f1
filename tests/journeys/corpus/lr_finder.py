"""A learning-rate finder that saves and restores the model around a range test, then trains."""
import copy
import math

import torch
from torch import nn
# use: import rearview


def find_lr(model, opt, data, start=1e-4, end=1.0, n=12):
    saved = copy.deepcopy(model.state_dict()), copy.deepcopy(opt.state_dict())
    mult, lr, best, losses = (end / start) ** (1 / n), start, None, []
    for k in range(n):
        for group in opt.param_groups:
            group["lr"] = lr
        x, y = data()
        loss = nn.functional.mse_loss(model(x), y)
        if best is not None and loss.item() > 20 * best:
            break
        best = loss.item() if best is None else min(best, loss.item())
        losses.append((lr, loss.item()))
        opt.zero_grad()
        loss.backward()
        opt.step()
        # inner: rearview.log("range_loss", loss.item())
        lr *= mult
    model.load_state_dict(saved[0])
    opt.load_state_dict(saved[1])
    return min(losses, key=lambda pair: pair[1])[0] / 10


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    opt = torch.optim.Adam(model.parameters())

    def data():
        x = torch.randn(16, 3)
        return x, x.prod(1, keepdim=True)

    lr = find_lr(model, opt, data)
    print("lr", lr, math.log10(lr))
    for group in opt.param_groups:
        group["lr"] = lr
    for epoch in range(6):
        for _ in range(5):
            x, y = data()
            loss = nn.functional.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        # outer: rearview.log("loss", loss.item())
        # outer: rearview.log("lr", opt.param_groups[0]["lr"])


main()
