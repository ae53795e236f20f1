"""Train one workload, saving one way after every epoch but the last; print what it took."""

import json
import resource
import sys
import tempfile
import time

import torch
from ways import WAYS, clean, nbytes
from workloads import WORKLOADS


def main():
    name, way_name, epochs, threads, part, folder = sys.argv[1:7]
    epochs = int(epochs)
    torch.set_num_threads(int(threads))
    place = tempfile.mkdtemp(dir=folder)
    try:
        job = WORKLOADS[name](float(part))
        job.train()
        way = WAYS[way_name](place)
        blocking = 0.0
        began, cpu = time.perf_counter(), time.process_time()
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        for epoch in way.loop(epochs, job.objects):
            job.train()
            if epoch < epochs - 1:
                saving = time.perf_counter()
                way.save(epoch, job.state())
                blocking += time.perf_counter() - saving
        ended = time.perf_counter()
        way.finish()
        cpu = time.process_time() - cpu
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu += after.ru_utime + after.ru_stime - children.ru_utime - children.ru_stime
        result = {
            "span": [began, ended],
            "cpu": cpu,
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "saved": way.saved,
            "blocking_ms": 1e3 * (blocking + way.blocking) / max(way.saved, 1),
            "logical_mb": way.saved * nbytes(job.state()) / 1e6,
            "stored_mb": way.stored() / 1e6,
        }
        if way.saved:
            result["restore_ms"] = min(1e3 * way.restore(job.state()) for _ in range(3))
        print(json.dumps(result))
    finally:
        clean(place)


if __name__ == "__main__":
    main()
