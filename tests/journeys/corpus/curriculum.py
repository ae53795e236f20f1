"""A curriculum: the loader is made again with longer sequences and larger batches as it goes."""
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset
# use: import rearview

torch.manual_seed(4)
base = TensorDataset(torch.randn(60, 10), torch.randint(0, 2, (60,)))
difficulty = base.tensors[0].abs().sum(1).argsort()
model = nn.Linear(10, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
stage, loader = 0, None
for epoch in range(9):
    if epoch % 3 == 0:
        stage += 1
        subset = Subset(base, difficulty[: 20 * stage].tolist())
        loader = DataLoader(subset, batch_size=5 * stage, shuffle=True)
        model = nn.Sequential(*(list(model) if stage > 1 else [model]), nn.Linear(2, 2))
        opt = torch.optim.SGD(model.parameters(), lr=0.1 / stage, momentum=0.5)
    seen = 0
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        seen += len(x)
        # inner: rearview.log("size", len(x))
        # inner: rearview.log("loss", loss.item())
    # outer: rearview.log("layers", len(model))
    # outer: rearview.log("w", model[0].weight.sum().item())
# after: rearview.log("stage", stage)
