"""An optimizer for each parameter, in a dict filled in the order of a set: another one in every process."""
import torch
# use: import rearview


def main():
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(4, 4), torch.nn.Tanh())]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(4, 1))
    x = torch.randn(12, 4)
    optimizers = {}
    scales = {}
    for epoch in range(3):
        for batch in x.split(4):
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            loss.backward()
            new = {p: torch.optim.Adam([p], lr=0.01) for p in set(model.parameters()) - optimizers.keys()}
            optimizers.update(new)
            scales.update({p: torch.ones(3) for p in new})
            for parameter in model.parameters():
                optimizers[parameter].step()
                optimizers[parameter].zero_grad()
                scales[parameter] *= 0.9
            # inner: rearview.log("batch_loss", loss.item())
        # outer: rearview.log("norm", sum(p.detach().norm().item() for p in model.parameters()))
    # after: rearview.log("bias", model[-1].bias.item())


if __name__ == "__main__":
    main()
