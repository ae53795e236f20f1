"""An MLPClassifier in a function of one's own; the loops over epochs and batches are scikit-learn's."""
import warnings

import numpy as np
from sklearn.metrics import log_loss
from sklearn.neural_network import MLPClassifier

# use: import rearview

warnings.simplefilter("ignore")


class Watched(MLPClassifier):
    """Looks at every batch, as people do who subclass for want of callbacks."""

    def _backprop(self, *args, **kwargs):
        found = super()._backprop(*args, **kwargs)
        # inner: rearview.log("batch_loss", float(found[0]))
        return found

    def _update_no_improvement_count(self, *args, **kwargs):
        super()._update_no_improvement_count(*args, **kwargs)
        norm = sum(float(np.square(w).sum()) for w in self.coefs_)
        # outer: rearview.log("norm", norm)


x = np.random.normal(size=(60, 5))
y = (x[:, 0] + 0.4 * np.random.normal(size=60) > 0).astype(int)
net = Watched((8,), max_iter=6, batch_size=20).fit(x, y)
final = log_loss(y, net.predict_proba(x)) + sum(net.loss_curve_)
# after: rearview.log("final", final)
print(final)
