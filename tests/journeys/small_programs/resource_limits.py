import resource

for name in ("RLIMIT_NOFILE", "RLIMIT_STACK", "RLIMIT_CORE", "RLIMIT_NPROC", "RLIMIT_MEMLOCK"):
    print(name, resource.getrlimit(getattr(resource, name)))
import os

print(os.getpriority(os.PRIO_PROCESS, 0), len(os.sched_getaffinity(0)), os.getpgid(0) == os.getpgrp())
