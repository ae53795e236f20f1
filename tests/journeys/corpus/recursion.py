"""Coarse-to-fine training by recursion: each level has a loop, calls the next level inside it."""
import random
# use: import rearview

random.seed(3)
weights = [0.0] * 4
trace = []


def refine(level, rounds):
    gain = 0.0
    for turn in range(rounds):
        weights[level] += random.uniform(-1, 1) / (level + 1)
        gain += weights[level]
        if level + 1 < len(weights) and turn % 2 == 0:
            gain += refine(level + 1, rounds - 1)
        trace.append((level, turn, round(gain, 6)))
        # inner: rearview.log("gain", gain)
    return gain


for epoch in range(5):
    total = refine(0, 4)
    # outer: rearview.log("total", total)
# after: rearview.log("length", len(trace))
