import threading

local = threading.local()
local.x = 1


def work():
    for i in range(3):
        local.x = i
    print(vars(local))


t = threading.Thread(target=work)
t.start()
t.join()
print(vars(local))
