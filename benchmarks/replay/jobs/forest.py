"""scikit-learn: a forest that grows, with a score after every step."""

from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier

data = load_digits()
forest = RandomForestClassifier(n_estimators=10, warm_start=True, random_state=0)
for size in range(10, 260, 10):
    forest.set_params(n_estimators=size)
    forest.fit(data.data[:1400], data.target[:1400])
    score = forest.score(data.data[1400:], data.target[1400:])
    # OUTER score
