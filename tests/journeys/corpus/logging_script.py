"""A script that already logs with rearview and uses arg; the probes add to what it keeps."""
# run: logging_script.py --lr 0.2
import torch

import rearview

lr = rearview.arg("lr", 0.1)
torch.manual_seed(rearview.arg("seed", 3))
w = torch.zeros(4, requires_grad=True)
target = torch.randn(4)
opt = torch.optim.SGD([w], lr=lr, momentum=0.9)
for epoch in rearview.loop("epoch", range(6)):
    for step in rearview.loop("step", range(5)):
        loss = (w - target + 0.1 * torch.randn(4)).pow(2).sum()
        opt.zero_grad()
        loss.backward()
        opt.step()
        rearview.log("loss", loss.item())
        # inner: rearview.log("grad", w.grad.norm().item())
    rearview.log({"distance": (w - target).norm().item(), "epoch_loss": loss.item()})
    # outer: rearview.log("momentum", opt.state[w]["momentum_buffer"].sum().item())
# after: rearview.log("end", w.sum().item())
