"""XGBoost, one round at a time, with a custom sampling of rows and early stopping by hand."""
import numpy as np
import xgboost as xgb
# use: import rearview

rng = np.random.default_rng(0)
X = rng.normal(size=(200, 6))
y = X[:, 0] ** 2 + X[:, 1] + 0.1 * rng.normal(size=200)
dtrain, dval = xgb.DMatrix(X[:150], y[:150]), xgb.DMatrix(X[150:], y[150:])
params = {"max_depth": 3, "eta": 0.3, "subsample": 0.8, "seed": 7, "nthread": 1}
booster, best, since = None, float("inf"), 0
for boost_round in range(10):
    booster = xgb.train(params, dtrain, num_boost_round=1, xgb_model=booster)
    residual = y[150:] - booster.predict(dval)
    rmse = float(np.sqrt(np.mean(residual**2)))
    # outer: rearview.log("rmse", rmse)
    for depth in (1, 2):
        params["eta"] = params["eta"] * (0.99 if depth == 1 else 1.0)
        # inner: rearview.log("eta", params["eta"])
    if rmse < best:
        best, since = rmse, 0
    else:
        since += 1
    if since > 3:
        break
# after: rearview.log("trees", booster.num_boosted_rounds())
