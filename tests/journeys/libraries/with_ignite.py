"""An Ignite engine with handlers, an evaluator and a scheduler; the loops are Ignite's."""
import torch
from ignite.engine import Engine, Events
from ignite.handlers import LRScheduler
from ignite.metrics import Loss
from torch import nn

# use: import rearview

x = torch.randn(24, 6)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
train = torch.utils.data.DataLoader(data, batch_size=6, shuffle=True)
val = torch.utils.data.DataLoader(data, batch_size=12)
net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 1))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
losses = []


def train_step(engine, batch):
    net.train()
    x, y = batch
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(net(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    # inner: rearview.log("batch_loss", loss.item())
    # inner: rearview.log("first_weight", net[0].weight[0, 0].item())
    return loss.item()


def eval_step(engine, batch):
    net.eval()
    with torch.no_grad():
        return net(batch[0]), batch[1]


trainer = Engine(train_step)
evaluator = Engine(eval_step)
Loss(nn.functional.mse_loss).attach(evaluator, "mse")
scheduler = LRScheduler(torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.8))
trainer.add_event_handler(Events.ITERATION_STARTED, scheduler)


@trainer.on(Events.EPOCH_COMPLETED)
def evaluate(engine):
    evaluator.run(val)
    mse = evaluator.state.metrics["mse"]
    # outer: rearview.log("mse", mse)
    # outer: rearview.log("weight_norm", net[0].weight.norm().item())
    engine.state.best = min(mse, getattr(engine.state, "best", mse))


@trainer.on(Events.ITERATION_COMPLETED(every=2))
def look(engine):
    rate = optimizer.param_groups[0]["lr"]
    # inner: rearview.log("rate", rate)


trainer.run(train, max_epochs=4)
final = sum(p.double().sum().item() for p in net.parameters()) + sum(losses)
# after: rearview.log("final", final)
print(final, trainer.state.best)
