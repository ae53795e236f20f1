"""A GAN with two optimizers and labels that flip."""
import random

import torch
import torch.nn as nn
# use: import rearview

random.seed(999)
torch.manual_seed(999)
nz, nd = 4, 6


def weights_init(m):
    if m.__class__.__name__.find("Linear") != -1:
        nn.init.normal_(m.weight.data, 0.0, 0.2)


netG = nn.Sequential(nn.Linear(nz, 16), nn.BatchNorm1d(16), nn.ReLU(True), nn.Linear(16, nd))
netD = nn.Sequential(nn.Linear(nd, 16), nn.LeakyReLU(0.2, inplace=True), nn.Linear(16, 1), nn.Sigmoid())
netG.apply(weights_init)
netD.apply(weights_init)
criterion = nn.BCELoss()
fixed_noise = torch.randn(8, nz)
real_label, fake_label = 1.0, 0.0
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
dataset = torch.utils.data.TensorDataset(torch.randn(64, nd) + 2)
dataloader = torch.utils.data.DataLoader(dataset, batch_size=16, shuffle=True)
samples, G_losses, D_losses = [], [], []
for epoch in range(5):
    for i, (real,) in enumerate(dataloader, 0):
        netD.zero_grad()
        flip = random.random() < 0.1
        label = torch.full((real.size(0),), fake_label if flip else real_label)
        errD_real = criterion(netD(real).view(-1), label)
        errD_real.backward()
        noise = torch.randn(real.size(0), nz)
        fake = netG(noise)
        label.fill_(fake_label)
        errD_fake = criterion(netD(fake.detach()).view(-1), label)
        errD_fake.backward()
        optimizerD.step()
        netG.zero_grad()
        label.fill_(real_label)
        output = netD(fake).view(-1)
        errG = criterion(output, label)
        errG.backward()
        optimizerG.step()
        G_losses.append(errG.item())
        D_losses.append((errD_real + errD_fake).item())
        # inner: rearview.log("d_of_g", output.mean().item())
    with torch.no_grad():
        samples.append(netG(fixed_noise).detach().cpu())
    # outer: rearview.log("spread", samples[-1].std().item())
    # outer: rearview.log("running", netG[1].running_mean.sum().item())
# after: rearview.log("losses", sum(G_losses))
