"""`it = iter(loader)` held in a variable, its workers started by a fork server: the default from Python 3.14 on."""
import torch
from torch.utils.data import DataLoader, Dataset
# use: import rearview


class Augmented(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.full((3,), float(i)) + torch.randn(3)


def main():
    torch.manual_seed(4)
    loader = DataLoader(
        Augmented(), batch_size=2, shuffle=True, num_workers=1, multiprocessing_context="forkserver"
    )
    weight = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.01, momentum=0.9)
    it = iter(loader)
    for step in range(6):
        try:
            x = next(it)
        except StopIteration:
            it = iter(loader)
            x = next(it)
        for row in x:
            loss = (row @ weight - row.sum()).square()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            # inner: rearview.log("row_loss", loss.item())
        # outer: rearview.log("batch_mean", x.mean().item())
    # after: rearview.log("weight", weight.sum().item())


if __name__ == "__main__":
    main()
