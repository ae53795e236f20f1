"""SWA and its scheduler, tqdm and trange with postfix, update_bn at the end."""
import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from tqdm import tqdm, trange
# use: import rearview

torch.manual_seed(21)
loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(torch.randn(48, 4), torch.randn(48, 1)), batch_size=12, shuffle=True
)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
swa_model = AveragedModel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
swa_scheduler = SWALR(optimizer, swa_lr=0.02, anneal_epochs=2)
for epoch in trange(8, desc="epochs"):
    bar = tqdm(loader, leave=False)
    for x, y in bar:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bar.set_postfix(loss=loss.item())
        # inner: rearview.log("loss", loss.item())
    if epoch >= 4:
        swa_model.update_parameters(model)
        swa_scheduler.step()
    else:
        scheduler.step()
    # outer: rearview.log("averaged", swa_model.n_averaged.item())
    # outer: rearview.log("lr", optimizer.param_groups[0]["lr"])
update_bn(loader, swa_model)
# after: rearview.log("bn", swa_model.module[1].running_var.sum().item())
