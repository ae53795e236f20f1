"""Processes that a replay starts belong to it, and leave the user's files and history alone."""

from plainly import recorded, write
from rearview._history import history

TEXT = """
import multiprocessing, os, random
def work(seed, queue):
    total = 0.0
    for step in range(3):
        total += random.Random(seed + step).random()
        # probe: import rearview; rearview.log("total", total)
    with open(f"part{seed}.txt", "a") as file:
        file.write("once ")
    queue.put((total, os.path.basename(os.getcwd())))
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    w = 0.0
    for epoch in range(2):
        queue = context.SimpleQueue()
        child = context.Process(target=work, args=(epoch, queue))
        child.start()
        w += queue.get()[0]
        child.join()
    print(w)
"""


def test_records_of_a_replays_child_process_belong_to_the_replay(tmp_path):
    write(tmp_path, train=TEXT)
    ended = recorded(tmp_path, "train.py")
    assert ended.code == 0, ended.err
    write(tmp_path, train=TEXT.replace("# probe: ", ""))
    past = history(tmp_path)
    report = past.backfill(["total"])
    assert not report.refusals
    assert len(past.runs()) == 1
    values = [row["total"] for row in past.table("total").rows() if row["total"] is not None]
    assert len(values) == 6
    assert (tmp_path / "part0.txt").read_text() == "once "
