"""A training that knows nothing of batch systems; its end state shows any step lost or done twice.

python handsfree.py EPOCHS SECONDS_PER_EPOCH NAME
"""

import hashlib
import random
import sys
import time
from pathlib import Path

epochs, pause, name = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
random.seed(7)
weights = [random.getrandbits(32) for _ in range(64)]
for epoch in range(epochs):
    for _step in range(10):
        weights = [(weight * 31 + random.getrandbits(32)) % 2**32 for weight in weights]
        time.sleep(pause / 10)
    print("epoch", epoch, flush=True)  # noqa: T201 - as scripts do
Path("model.txt").write_text(f"{name} {hashlib.sha256(repr(weights).encode()).hexdigest()}")
