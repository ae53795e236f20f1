import threading


def work():
    for i in range(3):
        1 / (1 - i)


for n in range(2):
    t = threading.Thread(target=work, name=f"worker {n}")
    t.start()
    t.join()
print("still here")
