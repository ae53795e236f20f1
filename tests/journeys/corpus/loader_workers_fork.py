"""A DataLoader with two forked workers, random transforms in the dataset, persistent workers off."""
import random

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
# use: import rearview


class Augmented(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        g = torch.randn(3)
        return g + i * random.random(), float(i % 2)


def seed_worker(worker_id):
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


def main():
    torch.manual_seed(0)
    loader = DataLoader(
        Augmented(), batch_size=6, shuffle=True, num_workers=2, worker_init_fn=seed_worker, multiprocessing_context="fork"
    )
    model = torch.nn.Linear(3, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(3):
        for i, (x, y) in enumerate(loader):
            loss = (model(x).squeeze(1) - y).pow(2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            # inner: rearview.log("x", x.sum().item())
        # outer: rearview.log("w", model.weight.sum().item())
    # after: rearview.log("b", model.bias.item())


if __name__ == "__main__":
    main()
