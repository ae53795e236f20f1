"""Tensors change their contents with others: conversion in place, an average that takes over."""
import torch
# use: import rearview

torch.manual_seed(14)
torch.__future__.set_swap_module_params_on_conversion(True)


class Marked(torch.Tensor):
    pass


net = torch.nn.Linear(4, 3)
best, last = torch.zeros(3, 4), torch.ones(3, 4)
plain, marked = torch.zeros(2), torch.ones(2).as_subclass(Marked)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
X = torch.randn(40, 4)

for epoch in range(6):
    for i in range(0, 40, 8):
        optimizer.zero_grad()
        loss = net(X[i : i + 8].to(net.weight.dtype)).pow(2).mean()
        loss.backward()
        optimizer.step()
        # inner: rearview.log("loss", loss.item())
    optimizer.zero_grad(set_to_none=True)
    net.to(torch.float64 if epoch % 2 == 0 else torch.float32)
    torch.utils.swap_tensors(best, last)
    torch.utils.swap_tensors(plain, marked)
    last.mul_(0.5).add_(net.weight.detach())
    plain += epoch
    # outer: rearview.log("norm", net.weight.norm().item())
    # outer: rearview.log("last", (last - best).norm().item())
    # outer: rearview.log("kinds", f"{type(plain).__name__} {type(marked).__name__} {plain.sum()}")
# after: rearview.log("total", best.sum().item())
