"""An entry point in the style of hydra: a decorator builds a config from overrides and calls main."""
# run: hydra_like.py optim.lr=0.05 epochs=5
import functools
import sys
from types import SimpleNamespace

import torch
# use: import rearview

DEFAULTS = {"epochs": 3, "optim": {"lr": 0.1, "name": "SGD"}}


def nested(mapping):
    return SimpleNamespace(**{k: nested(v) if isinstance(v, dict) else v for k, v in mapping.items()})


def configured(main):
    @functools.wraps(main)
    def start():
        cfg = nested(DEFAULTS)
        for override in sys.argv[1:]:
            path, _, text = override.partition("=")
            *parents, last = path.split(".")
            target = cfg
            for parent in parents:
                target = getattr(target, parent)
            setattr(target, last, type(getattr(target, last))(text))
        return main(cfg)

    return start


def instantiate(cfg, *args):
    return getattr(torch.optim, cfg.name)(*args, lr=cfg.lr)


@configured
def main(cfg):
    torch.manual_seed(0)
    w = torch.nn.Parameter(torch.randn(3))
    opt = instantiate(cfg.optim, [w])
    for epoch in range(cfg.epochs):
        for k in range(4):
            loss = (w - torch.randn(3)).pow(2).sum()
            opt.zero_grad()
            loss.backward()
            opt.step()
            # inner: rearview.log("loss", loss.item())
        cfg.optim.lr *= 0.5
        for group in opt.param_groups:
            group["lr"] = cfg.optim.lr
        # outer: rearview.log("lr", cfg.optim.lr)
    return w.sum().item()


if __name__ == "__main__":
    main()
