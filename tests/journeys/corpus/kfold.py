"""k-fold cross-validation: a fresh model per fold, scores gathered."""
import numpy as np
import torch
from sklearn.model_selection import KFold
from torch import nn
# use: import rearview

torch.manual_seed(8)
rng = np.random.RandomState(8)
X = rng.randn(50, 6).astype("float32")
y = (X[:, 0] + 0.3 * rng.randn(50) > 0).astype("float32")


def make():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))


scores = []
for fold, (train_idx, val_idx) in enumerate(KFold(4, shuffle=True).split(X)):
    model = make()
    opt = torch.optim.Adam(model.parameters(), lr=0.02)
    for epoch in range(4):
        perm = np.random.permutation(train_idx)
        for start in range(0, len(perm), 10):
            batch = perm[start : start + 10]
            loss = nn.functional.binary_cross_entropy_with_logits(
                model(torch.from_numpy(X[batch])).squeeze(1), torch.from_numpy(y[batch])
            )
            opt.zero_grad()
            loss.backward()
            opt.step()
        # inner: rearview.log("epoch_loss", loss.item())
    with torch.no_grad():
        acc = ((model(torch.from_numpy(X[val_idx])).squeeze(1) > 0).numpy() == y[val_idx]).mean()
    scores.append(float(acc))
    # outer: rearview.log("fold_weight", model[0].weight.norm().item())
print(np.mean(scores))
# after: rearview.log("mean", float(np.mean(scores)))
