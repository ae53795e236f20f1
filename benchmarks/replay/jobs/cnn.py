"""A small convolutional net on random images, with momentum."""

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(1)
images = torch.randn(512, 3, 32, 32)
labels = torch.randint(10, (512,))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU()
        )
        self.head = nn.Linear(32 * 13 * 13, 10)

    def forward(self, x):
        return self.head(self.body(x).flatten(1))


def train(model, optimizer, epoch):
    order = torch.randperm(len(images))
    for at in range(0, len(images), 64):
        chosen = order[at : at + 64]
        loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # INNER loss.item()


def main():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    for epoch in range(40):
        train(model, optimizer, epoch)
        # OUTER model.head.weight.norm().item()


if __name__ == "__main__":
    main()
