class Await:
    def __await__(self):
        got = yield "waiting"
        return got


async def work():
    try:
        for i in range(3):
            print("got", await Await())
    finally:
        print("finally")


coroutine = work()
for value in (None, 1, 2):
    print(coroutine.send(value))
coroutine.close()
coroutine = work()
coroutine.send(None)
try:
    coroutine.throw(KeyError("x"))
except KeyError as exc:
    print(repr(exc))
print(coroutine.cr_frame, coroutine.cr_running)
