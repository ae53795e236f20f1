"""Histograms of all weights, gradients and activations: plain SummaryWriter against a background one.

Every round trains the same steps three times in turn, in one process: without logging, with the plain
writer, with ours. The overhead of a round is its time over that without logging, of the same round.
Run: `python benchmarks/background/run.py [steps|epochs|scalars|memory|log|idle]…`
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch
from torch.utils.tensorboard import SummaryWriter

import rearview

BATCH, CHANNELS, SIZE = 16, 256, 8


class Net(torch.nn.Module):
    """Three convolutions of 3 by 3 over 256 channels: computing outweighs histograms, as in real nets."""

    def __init__(self):
        super().__init__()
        sizes = [16, CHANNELS, CHANNELS, CHANNELS]
        self.layers = torch.nn.ModuleList(
            torch.nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(sizes)
        )
        self.head = torch.nn.Linear(CHANNELS, 10)
        self.seen = []

    def forward(self, x):
        self.seen = []
        for layer in self.layers:
            x = torch.relu(layer(x))
            self.seen.append(x)
        return self.head(x.mean((2, 3)))


def log_all(writer, net, step):
    for name, parameter in net.named_parameters():
        writer.add_histogram(f"weights/{name}", parameter, step)
        writer.add_histogram(f"gradients/{name}", parameter.grad, step)
    for place, seen in enumerate(net.seen):
        writer.add_histogram(f"activations/{place}", seen, step)


def train(steps, batch, writer=None, every=1, net=None, first=0):
    torch.manual_seed(0)
    net = net or Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    x, y = torch.randn(batch, 16, SIZE, SIZE), torch.randint(0, 10, (batch,))
    began = time.perf_counter()
    for step in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        if writer is not None and step % every == 0:
            log_all(writer, net, first + step)
    return time.perf_counter() - began


def histograms(title, *, rounds, steps, batch, every):
    folder = tempfile.mkdtemp()
    plain = SummaryWriter(f"{folder}/plain")
    ours = rearview.background(SummaryWriter, f"{folder}/ours")
    train(2, batch)
    log_all(ours, _stepped(batch), 0)
    ours.flush()
    rows = []
    for number in range(rounds):
        bare = train(steps, batch)
        with_plain = train(steps, batch, plain, every, first=number * steps)
        with_ours = train(steps, batch, ours, every, first=number * steps)
        waited = time.perf_counter()
        ours.flush()  # so that the next round has both cores again; not training time
        waited = time.perf_counter() - waited
        gone = 1 - (with_ours - bare) / (with_plain - bare)
        rows.append((with_plain / bare - 1, with_ours / bare - 1, gone, waited, bare / steps))
    ours.close()
    plain.close()
    middle = [statistics.median(column) for column in zip(*rows, strict=True)]
    show(
        f"{title}: step {middle[4] * 1e3:.1f} ms, plain +{middle[0]:.0%}, ours +{middle[1]:.0%}, "
        f"{middle[2]:.1%} of the overhead gone (rounds {', '.join(f'{r[2]:.0%}' for r in rows)}); "
        f"writer behind by {middle[3]:.1f} s at the end of a round"
    )


def _stepped(batch):
    net = Net()
    net(torch.randn(batch, 16, SIZE, SIZE)).sum().backward()
    return net


def scalar_rate(rounds):
    """Steps of 10 ms with 167 scalars each: a million a minute."""
    ours = rearview.background(SummaryWriter, tempfile.mkdtemp())
    ours.add_scalar("warm", 0.0, 0)
    ours.flush()
    x = torch.randn(700, 700)

    def step():
        until = time.perf_counter() + 0.01
        while time.perf_counter() < until:
            x @ x

    shares, calls = [], []
    for number in range(rounds):
        for _ in range(20):
            step()
            began = time.perf_counter()
            for k in range(167):
                ours.add_scalar("loss", 0.5, number * 20000 + k)
            spent = time.perf_counter() - began
            shares.append(spent / 0.01)
            calls.append(spent / 167)
    waited = ours._rearview_channel.waited  # noqa: SLF001
    ours.close()
    show(
        f"10^6 scalars a minute: {statistics.median(calls) * 1e6:.2f} µs a call (least "
        f"{min(calls) * 1e6:.2f}), {statistics.median(shares):.2%} of a 10 ms step; waited {waited:.2f} s"
    )


class Slow:
    """Takes ten times as long for a histogram as training takes to make one."""

    def add_histogram(self, *_):
        time.sleep(0.02)

    def close(self):
        pass


def memory():
    """Resident shared memory under a writer that is ten times too slow."""
    bound = 64 << 20
    ours = rearview.background(Slow, background_memory=bound)
    channel = ours._rearview_channel  # noqa: SLF001
    values = torch.randn(1 << 20)  # 4 MB each
    most, began = 0, time.perf_counter()
    for step in range(150):
        ours.add_histogram("w", values, step)
        time.sleep(0.002)
        most = max(most, os.fstat(channel.ring.fd).st_blocks * 512)
    took = time.perf_counter() - began
    show(
        f"writer ten times too slow: at most {most / 2**20:.1f} MB of 600 MB in memory, bound "
        f"{bound / 2**20:.0f} MB; {took:.1f} s, of which waiting {channel.waited:.1f} s"
    )
    ours.close()


def five_scalars():
    """`rearview.log` of five numbers: when it returns, a kill does not lose them."""
    os.chdir(tempfile.mkdtemp())
    Path("train.py").write_text("")
    sys.argv = ["train.py"]
    values = {"a": 0.1, "b": 0.2, "c": 0.3, "d": 4, "e": 0.5}
    rearview.log(values)
    times = []
    for _ in range(20000):
        began = time.perf_counter_ns()
        rearview.log(values)
        times.append(time.perf_counter_ns() - began)
    show(
        f"rearview.log of five scalars: median {statistics.median(times) / 1e3:.2f} µs, "
        f"least {min(times) / 1e3:.2f} µs"
    )


def idle(rounds):
    """A background writer that is never called."""
    shares = []
    for _ in range(rounds):
        bare = train(20, BATCH)
        ours = rearview.background(SummaryWriter, tempfile.mkdtemp())
        ours.flush()
        with_ours = train(20, BATCH)
        ours.close()
        shares.append(with_ours / bare - 1)
    show(
        f"nothing logged: {statistics.median(shares):+.2%} ({', '.join(f'{s:+.1%}' for s in shares)})"
    )


def show(text):
    print(text, flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="*")
    what = set(parser.parse_args().what)
    torch.set_num_threads(1)  # the second core is the writer's
    if not what or "epochs" in what:
        histograms("four times per epoch", rounds=5, steps=20, batch=BATCH, every=5)
    if not what or "steps" in what:
        histograms("every step", rounds=5, steps=5, batch=4 * BATCH, every=1)
    if not what or "scalars" in what:
        scalar_rate(15)
    if not what or "memory" in what:
        memory()
    if not what or "idle" in what:
        idle(7)
    if not what or "log" in what:
        five_scalars()


if __name__ == "__main__":
    main()
