"""Boosting with sampling and a callback; the loop is LightGBM's."""
import lightgbm
import numpy as np

# use: import rearview


def look(env):
    done = env.iteration + 1
    # inner: rearview.log("error", float(env.evaluation_result_list[0][2]))
    # outer: rearview.log("trees", done)


rng = np.random.default_rng(1)
x = rng.normal(size=(60, 4))
y = x[:, 0] * 2 + rng.normal(size=60)
data = lightgbm.Dataset(x, label=y)
booster = lightgbm.train(
    {"objective": "regression", "num_threads": 1, "verbose": -1, "min_data_in_leaf": 3,
     "bagging_fraction": 0.7, "bagging_freq": 1, "seed": 3},
    data, 8, valid_sets=[data], callbacks=[look],
)
final = float(booster.predict(x).sum())
# after: rearview.log("final", final)
print(final)
