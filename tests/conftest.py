"""What holds for all tests."""

import gc
import os
import tempfile

# Which stores were made here is remembered in a folder of the tests' own, not in the user's.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="rearview-state-")

# Tests fork to be killed. Clients of servers that the parent left behind must not be collected in
# such a child: on their way out they wait for threads that only the parent has, or crash.
os.register_at_fork(after_in_child=gc.freeze)
