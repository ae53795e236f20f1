"""A program that trains in a coroutine runs as ever, and is asked by running it again."""

from plainly import plain, recorded, write
from rearview._history import history
from rearview.model.run import CAPTURED
from rearview.store.records import read

TEXT = """
import asyncio, random
async def batches():
    for k in range(3):
        await asyncio.sleep(0)
        yield random.random()
async def train():
    w = 0.0
    for epoch in range(4):
        async for batch in batches():
            w += 0.1 * (batch - w)
        # probe: import rearview; rearview.log("w", w)
    return w
random.seed(0)
print(asyncio.run(train()))
"""


def test_a_value_in_a_loop_of_a_coroutine_is_filled_by_running_it_again(tmp_path):
    write(tmp_path, train=TEXT)
    expected = plain(tmp_path, "train.py")
    assert recorded(tmp_path, "train.py").out == expected.out
    write(tmp_path, train=TEXT.replace("# probe: ", ""))
    report = history(tmp_path).backfill(["w"])
    assert not report.refusals
    assert not report.proved, "no state was saved, so nothing can be compared"
    values = [
        record.value
        for file in (tmp_path / ".rearview" / "runs").glob("*/records-*.jsonl")
        for record in read(file)
        if record.origin not in CAPTURED
    ]
    assert len(values) == 4
    assert values[-1] == float(expected.out)
