"""A VAE with reparameterisation; the loss is a function, the data a tensor that is indexed."""
import torch
from torch import nn, optim
from torch.nn import functional as F
# use: import rearview


class VAE(nn.Module):
    def __init__(self):
        super(VAE, self).__init__()
        self.fc1 = nn.Linear(12, 8)
        self.fc21, self.fc22 = nn.Linear(8, 2), nn.Linear(8, 2)
        self.fc3, self.fc4 = nn.Linear(2, 8), nn.Linear(8, 12)

    def encode(self, x):
        h = F.relu(self.fc1(x))
        return self.fc21(h), self.fc22(h)

    def reparameterize(self, mu, logvar):
        return mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)

    def forward(self, x):
        mu, logvar = self.encode(x)
        z = self.reparameterize(mu, logvar)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


def loss_function(recon, x, mu, logvar):
    bce = F.binary_cross_entropy(recon, x, reduction="sum")
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    # inner: rearview.log("kld", kld.item())
    return bce + kld


model = VAE()
optimizer = optim.Adam(model.parameters(), lr=1e-3)
data = (torch.rand(80, 12) > 0.5).float()


def train(epoch):
    model.train()
    train_loss = 0
    order = torch.randperm(len(data))
    for b in range(0, len(data), 16):
        x = data[order[b : b + 16]]
        optimizer.zero_grad()
        loss = loss_function(*[(r := model(x))[0], x, r[1], r[2]])
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
    print("====> Epoch: {} Average loss: {:.4f}".format(epoch, train_loss / len(data)))


if __name__ == "__main__":
    for epoch in range(1, 6):
        train(epoch)
        with torch.no_grad():
            sample = model.fc4(F.relu(model.fc3(torch.randn(4, 2))))
        # outer: rearview.log("sample", sample.sum().item())
