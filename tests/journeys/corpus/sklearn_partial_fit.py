"""scikit-learn's partial_fit over a stream of shuffled chunks, with a running scaler."""
import numpy as np
from sklearn.linear_model import SGDClassifier
from sklearn.preprocessing import StandardScaler
from sklearn.utils import shuffle
# use: import rearview

rng = np.random.RandomState(0)
X = rng.randn(300, 8)
y = (X @ rng.randn(8) > 0).astype(int)
scaler, clf = StandardScaler(), SGDClassifier(loss="log_loss", average=True)
history = []
for epoch in range(6):
    Xs, ys = shuffle(X, y)
    for chunk in range(0, len(Xs), 60):
        xb, yb = Xs[chunk : chunk + 60], ys[chunk : chunk + 60]
        clf.partial_fit(scaler.partial_fit(xb).transform(xb), yb, classes=[0, 1])
        # inner: rearview.log("coef", float(clf.coef_[0, 0]))
    history.append(clf.score(scaler.transform(X), y))
    # outer: rearview.log("mean", float(scaler.mean_.sum()))
    # outer: rearview.log("t", float(clf.t_))
# after: rearview.log("best", max(history))
