"""Data written once as CSV, read back each epoch; a log file appended to; a pickle of the state."""
import csv
import os
import pickle
import random
# use: import rearview

random.seed(2)
with open("data.csv", "w", newline="") as f:
    writer = csv.writer(f)
    for _ in range(40):
        a, b = random.random(), random.random()
        writer.writerow([a, b, 3 * a - b])
w = [0.0, 0.0]
log = open("train.log", "w")
for epoch in range(6):
    total = 0.0
    with open("data.csv", newline="") as f:
        for row in csv.reader(f):
            a, b, y = map(float, row)
            error = w[0] * a + w[1] * b - y
            w[0] -= 0.1 * error * a
            w[1] -= 0.1 * error * b
            total += error**2
            # inner: rearview.log("error", error)
    log.write(f"{epoch} {total}\n")
    log.flush()
    if epoch % 2 == 1:
        with open(f"state{epoch}.pkl", "wb") as f:
            pickle.dump(w, f)
    if epoch == 4:
        with open("state1.pkl", "rb") as f:
            w = [(u + v) / 2 for u, v in zip(w, pickle.load(f))]
    # outer: rearview.log("w", w[0])
log.close()
# after: rearview.log("lines", len(open("train.log").readlines()))
# after: rearview.log("files", len([n for n in os.listdir(".") if n.endswith(".pkl")]))
