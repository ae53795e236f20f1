"""Evolution strategy: a pool of processes kept over all generations."""
import multiprocessing
import random
# use: import rearview


def reward(task):
    seed, shift = task
    chance = random.Random(seed)
    return sum((chance.gauss(0, 1) + shift) ** 2 for _ in range(20))


if __name__ == "__main__":
    random.seed(0)
    theta = [0.5, -0.5]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        for generation in range(5):
            noise = [[random.gauss(0, 1) for _ in theta] for _ in range(4)]
            found = pool.map(reward, [(random.randrange(1000), sum(theta) + n[0]) for n in noise])
            for n, r in zip(noise, found):
                theta = [t - 1e-3 * r * e for t, e in zip(theta, n)]
                # inner: rearview.log("theta", theta[0])
            # outer: rearview.log("best", min(found))
