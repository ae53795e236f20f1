import builtins
import io
import os
import pickle
import random
import time

print(open, builtins.open is io.open, print, input, __import__, exec, eval, compile)
print(os.urandom, os._exit, os.fork, os.listdir, os.stat, os.remove, os.open)
print(time.time, time.perf_counter, time.monotonic, time.sleep, time.time_ns, time.strftime, time.localtime)
print(type(os.environ).__mro__, random.random.__self__.__class__, random.Random, random.SystemRandom)
for function in (time.time, time.perf_counter, os.urandom, os._exit, os.getpid):
    print(function.__name__, function.__qualname__, function.__doc__, pickle.loads(pickle.dumps(function)) is function)


class Timer:
    clock = time.perf_counter
    random_bytes = os.urandom

    def __init__(self):
        self.began = self.clock()


for i in range(2):
    print(type(Timer().began), len(Timer().random_bytes(3)))
