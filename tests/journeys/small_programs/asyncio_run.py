import asyncio


async def numbers(n):
    for i in range(n):
        await asyncio.sleep(0)
        yield i


async def work(n):
    total = 0
    async for i in numbers(n):
        total += i
    else:
        total += 100
    return total, [i async for i in numbers(3)], {i: j for i in range(2) async for j in numbers(2)}


async def main():
    print(await asyncio.gather(*(work(n) for n in range(4))))
    try:
        async with asyncio.timeout(0.01):
            while True:
                await asyncio.sleep(0)
    except TimeoutError as exc:
        print("timeout", exc)
    async with asyncio.TaskGroup() as group:
        for i in range(3):
            group.create_task(work(i))


asyncio.run(main())
