"""scikit-learn in the ways people use it: partial_fit, warm_start, an MLP, a grid with a scorer."""
import warnings

import numpy as np
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import SGDClassifier
from sklearn.metrics import accuracy_score
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.neural_network import MLPClassifier

# use: import rearview

warnings.simplefilter("ignore")
x = np.random.normal(size=(90, 5))
y = (x[:, 0] + 0.4 * np.random.normal(size=90) > 0).astype(int)
model = SGDClassifier(loss="log_loss")
forest = RandomForestClassifier(n_estimators=0, warm_start=True, max_depth=3)
scores = []


def scorer(estimator, some, labels):
    found = accuracy_score(labels, estimator.predict(some))
    # after: rearview.log("score_inside", float(found))
    return found


for epoch in range(4):
    order = np.random.permutation(len(x))
    for first in range(0, len(x), 30):
        rows = order[first : first + 30]
        model.partial_fit(x[rows], y[rows], classes=[0, 1])
        loss = -model.predict_log_proba(x[rows])[np.arange(30), y[rows]].mean()
        # inner: rearview.log("loss", float(loss))
    forest.n_estimators += 2
    forest.fit(x, y)
    scores.append(cross_val_score(model, x, y, scoring=scorer, cv=3).mean())
    # outer: rearview.log("forest", float(forest.predict_proba(x)[:, 1].sum()))
    # outer: rearview.log("coefficient", float(model.coef_[0, 0]))

grid = GridSearchCV(SGDClassifier(loss="hinge"), {"alpha": [1e-4, 1e-2]}, scoring=scorer, cv=3)
grid.fit(x, y)
net = MLPClassifier((8,), max_iter=5, batch_size=30).fit(x, y)
final = sum(scores) + grid.best_score_ + float(net.loss_)
# after: rearview.log("final", final)
print(final)
