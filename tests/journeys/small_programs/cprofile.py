import cProfile
import pstats


def work(n):
    total = 0
    for i in range(n):
        total += square(i)
    return total


def square(i):
    return i * i


work(3)
profile = cProfile.Profile()
profile.enable()
work(10)
profile.disable()
stats = pstats.Stats(profile)
for (file, line, name), (calls, *_) in sorted(stats.stats.items()):
    if file == __file__:
        print(line, name, calls)
