"""python -m proj.train"""
import argparse

import torch
from torch.utils.data import DataLoader, TensorDataset
# use: import rearview

from proj import config
from proj.engine import run_epoch
from proj.models import Net


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--hidden", type=int)
    cfg = config.current
    for key, value in vars(parser.parse_args()).items():
        setattr(cfg, key, value)
    torch.manual_seed(0)
    model = Net(cfg.hidden)
    opt = torch.optim.NAdam(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(40, 4), torch.randn(40, 1)), 8, shuffle=True)
    for epoch in range(cfg.epochs):
        cfg.history.append(run_epoch(model, opt, loader))
        # outer: rearview.log("step", config.step)
        # outer: rearview.log("calls", Net.calls)
    # after: rearview.log("history", sum(cfg.history))


if __name__ == "__main__":
    main()
