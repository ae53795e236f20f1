"""A Trainer class with callbacks, history and methods that call each other."""
from collections import defaultdict

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
# use: import rearview


class Points(Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(3)
        self.x = torch.randn(n, 5, generator=g)
        self.y = self.x @ torch.arange(5.0) + 0.1 * torch.randn(n, generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i] + 0.01 * torch.randn(5), self.y[i]


class Callback:
    def on_epoch_end(self, trainer):
        pass


class History(Callback):
    def __init__(self):
        self.rows = []

    def on_epoch_end(self, trainer):
        self.rows.append(dict(trainer.metrics))


class Trainer:
    runs = 0

    def __init__(self, model, loader, lr=0.05, callbacks=()):
        Trainer.runs += 1
        self.model, self.loader = model, loader
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=0.1, total_steps=200
        )
        self.callbacks = list(callbacks)
        self.metrics = defaultdict(float)
        self.step = 0

    def _batch(self, batch):
        x, y = batch
        loss = nn.functional.mse_loss(self.model(x).squeeze(-1), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.step += 1
        # inner: rearview.log("lr", self.optimizer.param_groups[0]["lr"])
        return loss.item()

    def _epoch(self):
        self.metrics.clear()
        for batch in self.loader:
            self.metrics["loss"] += self._batch(batch)

    def fit(self, epochs):
        for self.epoch in range(epochs):
            self._epoch()
            for callback in self.callbacks:
                callback.on_epoch_end(self)
            # outer: rearview.log("total", self.metrics["loss"])
            # outer: rearview.log("momentum", sum(s["momentum_buffer"].sum().item() for s in self.optimizer.state.values()))
        return self


torch.manual_seed(0)
history = History()
trainer = Trainer(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)), DataLoader(Points(64), 8, shuffle=True), callbacks=[history]).fit(6)
# after: rearview.log("rows", len(history.rows))
print(history.rows[-1])
