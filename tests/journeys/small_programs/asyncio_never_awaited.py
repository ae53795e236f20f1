import asyncio


async def work():
    for i in range(3):
        await asyncio.sleep(0)


for i in range(2):
    work()


async def main():
    asyncio.create_task(work())


asyncio.run(main())
