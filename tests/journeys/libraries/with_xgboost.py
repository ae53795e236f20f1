"""Boosting with a callback; the loop is XGBoost's."""
import numpy as np
import xgboost

# use: import rearview


class Look(xgboost.callback.TrainingCallback):
    def after_iteration(self, model, epoch, evals_log):
        error = evals_log["train"]["rmse"][-1]
        # inner: rearview.log("error", float(error))
        # outer: rearview.log("trees", model.num_boosted_rounds())
        return False


rng = np.random.default_rng(1)
x = rng.normal(size=(60, 4))
data = xgboost.DMatrix(x, label=x[:, 0] * 2 + rng.normal(size=60))
booster = xgboost.train(
    {"max_depth": 2, "seed": 3, "nthread": 1}, data, 8,
    evals=[(data, "train")], callbacks=[Look()], verbose_eval=False,
)
final = float(booster.predict(data).sum())
# after: rearview.log("final", final)
print(final)
