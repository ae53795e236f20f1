"""The program that `rearview demo` records: plain PyTorch that has never heard of Rearview."""

SCRIPT = '''\
"""Train a small convolutional network on handwritten digits."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--width", type=int, default=40)
args = parser.parse_args()
torch.set_num_threads(1)  # the network is small

digits = load_digits()
images = torch.tensor(digits.images / 16.0, dtype=torch.float32).unsqueeze(1)
train, test = random_split(TensorDataset(images, torch.tensor(digits.target)), [0.8, 0.2])
loader = DataLoader(train, batch_size=32, shuffle=True)
held_out = DataLoader(test, batch_size=len(test))

model = nn.Sequential(
    nn.Conv2d(1, args.width, 3, padding=1),
    nn.BatchNorm2d(args.width),
    nn.ReLU(),
    nn.Conv2d(args.width, 2 * args.width, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Dropout(0.3),
    nn.Linear(2 * args.width * 16, 10),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
criterion = nn.CrossEntropyLoss()

for epoch in range(args.epochs):
    model.train()
    total = 0.0
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(y)
    scheduler.step()

    model.eval()
    with torch.no_grad():
        x, y = next(iter(held_out))
        accuracy = (model(x).argmax(1) == y).float().mean().item()
    print(f"epoch {epoch:2d}  loss {total / len(train):.4f}  accuracy {accuracy:.3f}")
'''

ANCHOR = "    scheduler.step()\n"
PROBE = '    rearview.log("weight_norm", sum(p.norm().item() ** 2 for p in model.parameters()) ** 0.5)\n'
INNER_ANCHOR = "        loss.backward()\n"
INNER_PROBE = (
    '        rearview.log("grad_norm", sum(p.grad.norm().item() ** 2 '
    "for p in model.parameters()) ** 0.5)\n"
)


def edited() -> str:
    """Return the program with two questions added that nobody asked when it ran.

    >>> from difflib import ndiff
    >>> lines = ndiff(SCRIPT.splitlines(), edited().splitlines())
    >>> sum(line.startswith("+ ") for line in lines)
    3
    """
    text = SCRIPT.replace("import torch\n", "import rearview\nimport torch\n", 1)
    text = text.replace(ANCHOR, ANCHOR + PROBE, 1)
    return text.replace(INNER_ANCHOR, INNER_ANCHOR + INNER_PROBE, 1)
