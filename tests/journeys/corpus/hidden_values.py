"""State that stands in no attribute: context variables, thread locals, shared numbers, a queue."""
import contextvars
import ctypes
import multiprocessing
import queue
import random
import threading
# use: import rearview

random.seed(0)
smooth = contextvars.ContextVar("smooth", default=0.0)
mine = threading.local()
mine.steps = 0
seen = multiprocessing.Value("d", 0.0)
counts = multiprocessing.Array("i", 3)
clock = ctypes.c_int(0)
waiting = queue.Queue()
total = 0.0
for epoch in range(6):
    for step in range(4):
        smooth.set(0.9 * smooth.get() + random.random())
        mine.steps += 1
        with seen.get_lock():
            seen.value += smooth.get()
        counts[step % 3] += mine.steps
        clock.value += step
        waiting.put(step)
        total += 0.01 * seen.value + counts[0] + clock.value
        # inner: rearview.log("smooth", smooth.get())
    total += waiting.get() + waiting.qsize()
    # outer: rearview.log("seen", seen.value + mine.steps)
# after: rearview.log("total", total)
