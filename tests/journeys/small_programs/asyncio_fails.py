import asyncio


async def work(n):
    for i in range(n):
        await asyncio.sleep(0)
        if i == 2:
            raise ValueError(i)


async def main():
    async with asyncio.TaskGroup() as group:
        for n in (1, 3, 4):
            group.create_task(work(n))


asyncio.run(main())
