"""Pretraining, then fine-tuning with the same function, then a last evaluation through forward()."""
import torch
from torch import nn
# use: import rearview


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
            # inner: rearview.log("activation", x.abs().mean().item())
        return self.head(x)


def fit(model, x, y, epochs, lr):
    opt = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=lr)
    for epoch in range(epochs):
        for i in range(0, len(x), 8):
            loss = (model(x[i : i + 8]) - y[i : i + 8]).pow(2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
        # outer: rearview.log("loss", loss.item())
    return loss.item()


torch.manual_seed(31)
model = Net()
first = fit(model, torch.randn(32, 4), torch.randn(32, 1), 6, 0.01)
for p in model.layers.parameters():
    p.requires_grad_(False)
second = fit(model, torch.randn(24, 4), torch.randn(24, 1), 4, 0.05)
score = model(torch.randn(5, 4)).mean().item()
# after: rearview.log("score", score + first + second)
