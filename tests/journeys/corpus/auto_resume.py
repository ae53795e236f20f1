"""Looks for its own checkpoint, numbers its folder, makes folders, appends to logs."""
import os
import pickle
import random
# use: import rearview

random.seed(0)
w, first = [random.random() for _ in range(4)], 0
os.makedirs("out/logs")
name = f"exp{len([d for d in os.listdir('.') if d.startswith('exp')])}"
os.mkdir(name)
if os.path.exists("out/ckpt.pkl"):
    with open("out/ckpt.pkl", "rb") as f:
        w, first, chance = pickle.load(f)
    random.setstate(chance)
log = open("train.log", "a")
with open(f"{name}/args.txt", "x") as f:
    f.write("args")
for epoch in range(first, 6):
    for step in range(5):
        w = [0.9 * v + 0.1 * random.random() for v in w]
        # inner: rearview.log("w0", w[0])
    os.mkdir(f"{name}/epoch{epoch}")
    with open(f"{name}/epoch{epoch}/w.txt", "x") as f:
        f.write(repr(w))
    with open("out/ckpt.pkl", "wb") as f:
        pickle.dump((w, epoch + 1, random.getstate()), f)
    log.write(f"{epoch} {w[0]}\n")
    log.flush()
    # outer: rearview.log("sum", sum(w))
# after: rearview.log("folders", len(os.listdir(name)))
