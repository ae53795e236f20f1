import threading

go = threading.Event()


def work():
    go.wait()


threading.Thread(target=work, daemon=True).start()
for i in range(3):
    print(i)
print([t.name for t in threading.enumerate()])
