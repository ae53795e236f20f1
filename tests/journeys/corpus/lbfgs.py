"""LBFGS with a closure, a sequence model fed double precision, as in the sine-wave example."""
import torch
from torch import nn, optim
# use: import rearview


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRUCell(1, 6), nn.Linear(6, 1)

    def forward(self, x):
        outputs, h = [], torch.zeros(x.size(0), 6, dtype=torch.double)
        for t in x.split(1, dim=1):
            h = self.cell(t, h)
            outputs.append(self.out(h))
        return torch.cat(outputs, dim=1)


if __name__ == "__main__":
    torch.manual_seed(0)
    data = torch.sin(torch.arange(12).double() / 3 + torch.rand(4, 1).double())
    seq = Sequence().double()
    criterion = nn.MSELoss()
    optimizer = optim.LBFGS(seq.parameters(), lr=0.5, max_iter=4, history_size=5)
    for i in range(6):
        print("STEP: ", i)

        def closure():
            optimizer.zero_grad()
            loss = criterion(seq(data[:, :-1]), data[:, 1:])
            # inner: rearview.log("closure", loss.item())
            loss.backward()
            return loss

        optimizer.step(closure)
        with torch.no_grad():
            pred = seq(data)
        # outer: rearview.log("pred", pred[0, -1].item())
    # after: rearview.log("n_iter", optimizer.state[optimizer._params[0]]["n_iter"])
