"""Training jobs shaped like table 3 of the Flor paper, scaled to a CPU.

Epochs are of two to three seconds, whatever is trained. Each function takes how much of an epoch to
train (1 is a whole one) and returns a Job.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn


class Job(NamedTuple):
    """Something to train."""

    train: Callable[[], None]
    """Trains for one epoch."""
    state: Callable[[], dict]
    """Everything that a checkpoint must hold, as nested dicts of tensors and arrays."""
    objects: dict[str, Any]
    """The same as live objects, for libraries that want those."""


def _count(number, part):
    return max(1, round(number * part))


def _torch(model, batches, loss_of, lr=1e-3):
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=lr)

    def epoch():
        for batch in batches:
            optimizer.zero_grad(set_to_none=True)
            loss_of(model, *batch).backward()
            optimizer.step()

    return Job(
        epoch,
        lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        {"model": model, "optimizer": optimizer},
    )


def _classify(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


def adamw25(part=1.0):
    """25M parameters, all trained."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *[m for _ in range(6) for m in (nn.Linear(2048, 2048), nn.ReLU())], nn.Linear(2048, 10)
    )
    batches = [(torch.randn(128, 2048), torch.randint(10, (128,))) for _ in range(_count(8, part))]
    return _torch(model, batches, _classify)


def frozen100(part=1.0):
    """Fine-tuning: 100M parameters frozen, 1M trained (the shape of RTE and CoLA)."""
    torch.manual_seed(0)
    backbone = nn.Sequential(
        *[m for _ in range(24) for m in (nn.Linear(2048, 2048), nn.ReLU())]
    ).requires_grad_(False)
    model = nn.Sequential(backbone, nn.Linear(2048, 490), nn.ReLU(), nn.Linear(490, 2))
    batches = [(torch.randn(32, 2048), torch.randint(2, (32,))) for _ in range(_count(24, part))]
    return _torch(model, batches, _classify)


def cnn(part=1.0):
    """A small convolutional net (Cifr)."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 64, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip
    batches = [
        (torch.randn(64, 3, 32, 32), torch.randint(10, (64,))) for _ in range(_count(48, part))
    ]
    return _torch(model, batches, _classify)


class _Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x):
        return torch.relu(x + self.body(x))


def resnet(part=1.0):
    """A deep residual net: many small tensors (RsNt, ImgN)."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1), *[_Residual(24) for _ in range(40)],
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10),
    )  # fmt: skip
    batches = [
        (torch.randn(16, 3, 16, 16), torch.randint(10, (16,))) for _ in range(_count(10, part))
    ]
    return _torch(model, batches, _classify)


class _LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8000, 256)
        layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, dropout=0.1)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, 8000)

    def forward(self, x):
        return self.head(self.layers(self.embed(x)))


def lm(part=1.0):
    """A transformer language model (Wiki)."""
    torch.manual_seed(0)
    data = [torch.randint(8000, (8, 65)) for _ in range(_count(9, part))]
    return _torch(
        _LM(),
        [(tokens,) for tokens in data],
        lambda model, t: nn.functional.cross_entropy(
            model(t[:, :-1]).flatten(0, 1), t[:, 1:].flatten()
        ),
    )


class _Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(2000, 128)
        self.rnn = nn.GRU(128, 256, num_layers=2, batch_first=True)
        self.attend = nn.MultiheadAttention(256, 4, batch_first=True)
        self.head = nn.Linear(256, 2000)

    def forward(self, x):
        hidden, _ = self.rnn(self.embed(x))
        return self.head(self.attend(hidden, hidden, hidden)[0])


def rnn(part=1.0):
    """A recurrent net with attention (RnnT, Jasp)."""
    torch.manual_seed(0)
    data = [torch.randint(2000, (16, 33)) for _ in range(_count(28, part))]
    return _torch(
        _Attention(),
        [(tokens,) for tokens in data],
        lambda model, t: nn.functional.cross_entropy(
            model(t[:, :-1]).flatten(0, 1), t[:, 1:].flatten()
        ),
    )


def numpy_mlp(part=1.0):
    """Plain numpy: a two-layer net with momentum."""
    rng = np.random.default_rng(0)
    w = {"w1": rng.standard_normal((784, 512)) * 0.05, "w2": rng.standard_normal((512, 10)) * 0.05}
    v = {f"v{key}": np.zeros_like(value) for key, value in w.items()}
    x, y = rng.standard_normal((2048, 784)), rng.integers(10, size=2048)

    def epoch():
        for at in range(0, _count(16 * len(x), part), 64):
            at %= len(x)  # noqa: PLW2901 - sixteen times through the data
            xb, yb = x[at : at + 64], y[at : at + 64]
            h = np.maximum(xb @ w["w1"], 0)
            p = h @ w["w2"]
            p = np.exp(p - p.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            p[np.arange(len(yb)), yb] -= 1
            for key, grad in (("w2", h.T @ p), ("w1", xb.T @ ((p @ w["w2"].T) * (h > 0)))):
                v["v" + key] *= 0.9
                v["v" + key] += grad / 64
                w[key] -= 0.01 * v["v" + key]

    return Job(epoch, lambda: {**w, **v}, {**w, **v})


def sklearn_sgd(part=1.0):
    """scikit-learn: a linear model by stochastic gradient descent."""
    from sklearn.datasets import load_digits
    from sklearn.linear_model import SGDClassifier

    data = load_digits()
    model = SGDClassifier(loss="log_loss", random_state=0)
    classes = np.unique(data.target)

    def epoch():
        for _ in range(_count(260, part)):
            model.partial_fit(data.data, data.target, classes=classes)

    epoch()
    return Job(
        epoch,
        lambda: {
            "coef": model.coef_,
            "intercept": model.intercept_,
            "t": np.array([model.t_]),
        },
        {"model": model},
    )


WORKLOADS = {
    f.__name__: f for f in (adamw25, frozen100, cnn, resnet, lm, rnn, numpy_mlp, sklearn_sgd)
}
