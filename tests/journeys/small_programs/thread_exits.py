import sys
import threading


def work(code):
    for i in range(3):
        sys.exit(code)


for code in (None, 3, "text"):
    t = threading.Thread(target=work, args=(code,))
    t.start()
    t.join()
print("still here")
