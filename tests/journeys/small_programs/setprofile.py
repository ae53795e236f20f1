import sys

events = []


def profiler(frame, event, arg):
    if frame.f_code.co_filename == __file__ and not event.startswith("c_"):
        events.append((frame.f_code.co_name, event))


def work(n):
    total = 0
    for i in [1, 2, 3]:
        total += len([i])
    while total > 1:
        total -= 1
    return total


work(1)
sys.setprofile(profiler)
work(3)
for i in range(3):
    work(i)
sys.setprofile(None)
for event in events:
    print(event)
