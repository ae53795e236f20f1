"""Keras 3 on torch as it comes: a progress bar, validation, callbacks in threads."""
import os

os.environ["KERAS_BACKEND"] = "torch"
import keras
import numpy as np

# use: import rearview


class Look(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        weight = self.model.layers[0].get_weights()[0]
        # outer: rearview.log("first_layer", float(np.sum(weight)))


x = np.random.default_rng(3).normal(size=(24, 6)).astype("float32")
y = x.sum(axis=1, keepdims=True)
model = keras.Sequential([
    keras.Input((6,)),
    keras.layers.Dense(12, activation="relu"),
    keras.layers.Dropout(0.2),
    keras.layers.Dense(1),
])
model.compile(optimizer=keras.optimizers.Adam(1e-2), loss="mse")
history = model.fit(x, y, batch_size=6, epochs=4, validation_split=0.25, callbacks=[Look()])
final = float(sum(np.sum(w) for w in model.get_weights()))
# after: rearview.log("final", final)
print(final)
