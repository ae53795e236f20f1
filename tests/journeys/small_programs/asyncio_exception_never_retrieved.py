import asyncio


async def work():
    for i in range(3):
        raise ValueError(i)


async def main():
    task = asyncio.create_task(work(), name="lost")
    await asyncio.sleep(0)
    del task


asyncio.run(main())
