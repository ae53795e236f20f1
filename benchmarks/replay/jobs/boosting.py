"""XGBoost, round by round."""

import numpy as np
import xgboost

rng = np.random.default_rng(0)
x = rng.standard_normal((6000, 40))
y = (x[:, :5].sum(1) + rng.standard_normal(6000) > 0).astype(int)
train = xgboost.DMatrix(x, label=y)
booster = xgboost.Booster({"objective": "binary:logistic", "max_depth": 6, "nthread": 1}, [train])
for round_ in range(80):
    booster.update(train, round_)
    # OUTER float(booster.predict(train).mean())
