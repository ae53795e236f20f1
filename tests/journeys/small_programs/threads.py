import threading

results = {}


def work(name):
    total = 0
    for i in range(100):
        total += i
    results[name] = total, threading.current_thread().name


threads = [threading.Thread(target=work, args=(n,), name=f"t{n}") for n in range(4)]
for t in threads:
    t.start()
for t in threads:
    t.join()
print(sorted(results.items()), threading.main_thread().name, threading.active_count())
