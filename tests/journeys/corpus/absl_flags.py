"""An absl program: flags, `app.run`."""
# run: absl_flags.py --epochs=5 --lr 0.2
import random

from absl import app, flags
# use: import rearview

FLAGS = flags.FLAGS
flags.DEFINE_integer("epochs", 2, "epochs")
flags.DEFINE_float("lr", 0.1, "rate")


def main(argv):
    random.seed(1)
    w = 0.0
    for epoch in range(FLAGS.epochs):
        for step in range(4):
            w += FLAGS.lr * (random.random() - w)
            # inner: rearview.log("w", w)
        FLAGS.lr *= 0.9
        # outer: rearview.log("lr", FLAGS.lr)


if __name__ == "__main__":
    app.run(main)
