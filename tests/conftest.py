"""What holds for all tests."""

import gc
import os

# Tests fork to be killed. Clients of servers that the parent left behind must not be collected in
# such a child: on their way out they wait for threads that only the parent has, or crash.
os.register_at_fork(after_in_child=gc.freeze)
