"""LightGBM, boosted in chunks with init_model; a callback gathers evaluations."""
import lightgbm as lgb
import numpy as np
# use: import rearview

rng = np.random.RandomState(3)
X, y = rng.rand(300, 5), rng.rand(300)
booster, evals = None, {}
for chunk in range(5):
    train = lgb.Dataset(X, label=y + 0.01 * rng.randn(300), free_raw_data=False)
    booster = lgb.train(
        {"verbosity": -1, "num_threads": 1, "deterministic": True, "bagging_fraction": 0.7, "bagging_freq": 1, "seed": chunk},
        train,
        num_boost_round=3,
        init_model=booster,
        valid_sets=[train],
        callbacks=[lgb.record_evaluation(evals)],
        keep_training_booster=False,
    )
    for row in range(3):
        guess = float(booster.predict(X[row : row + 1])[0])
        # inner: rearview.log("guess", guess)
    # outer: rearview.log("trees", booster.num_trees())
# after: rearview.log("loss", evals["training"]["l2"][-1])
