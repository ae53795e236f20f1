"""Lightning as it comes: with its progress bar, its logger and its checkpoints."""
import warnings

import torch
from torch import nn

# use: import rearview

warnings.simplefilter("ignore")
import lightning.pytorch as pl  # noqa: E402


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 1))
        self.seen = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("train_loss", loss, prog_bar=True)
        self.seen.append(batch_idx)
        # inner: rearview.log("batch_loss", loss.item())
        # inner: rearview.log("first_weight", self.net[0].weight[0, 0].item())
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(x), y))

    def on_train_epoch_end(self):
        norm = sum(p.norm() for p in self.parameters())
        # outer: rearview.log("weight_norm", norm.item())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.8)]


x = torch.randn(24, 6)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
train = torch.utils.data.DataLoader(data, batch_size=6, shuffle=True)
val = torch.utils.data.DataLoader(data, batch_size=12)
model = Net()
trainer = pl.Trainer(max_epochs=3)
trainer.fit(model, train, val)
final = sum(p.double().sum().item() for p in model.parameters())
# after: rearview.log("final", final)
print(final)
