import torch
from torch import nn


class Net(nn.Module):
    calls = 0

    def __init__(self, hidden):
        super().__init__()
        self.a, self.b = nn.Linear(4, hidden), nn.Linear(hidden, 1)

    def forward(self, x):
        type(self).calls += 1
        return self.b(torch.relu(self.a(x)))
