"""A study of a small training with a pruner and a callback; the loop over trials is Optuna's."""
import warnings

import numpy as np
import optuna

# use: import rearview

warnings.simplefilter("ignore")
optuna.logging.set_verbosity(optuna.logging.ERROR)
rng = np.random.default_rng(4)
x = rng.normal(size=(40, 5))
y = x @ rng.normal(size=5) + 0.1 * rng.normal(size=40)
tried = []


def objective(trial):
    rate = trial.suggest_float("rate", 1e-3, 0.3, log=True)
    batch = trial.suggest_categorical("batch", [5, 10, 20])
    weight = np.random.normal(size=5)
    for epoch in range(4):
        order = np.random.permutation(len(x))
        for first in range(0, len(x), batch):
            rows = order[first : first + batch]
            error = x[rows] @ weight - y[rows]
            weight = weight - rate * x[rows].T @ error / len(rows)
            # inner: rearview.log("error", float(np.abs(error).sum()))
        loss = float(((x @ weight - y) ** 2).mean())
        trial.report(loss, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    # outer: rearview.log("weight_norm", float(np.linalg.norm(weight)))
    tried.append(loss)
    return loss


def look(study, trial):
    best = study.best_value
    # outer: rearview.log("best_so_far", best)


study = optuna.create_study(pruner=optuna.pruners.MedianPruner(n_startup_trials=3))
study.optimize(objective, n_trials=7, callbacks=[look])
final = study.best_value + sum(tried)
# after: rearview.log("final", final)
print(final, study.best_params)
