"""First file of a process that runs the user's program.

Started as `python …/first_file.py`: `-m` would put the user's folder first on the path, so that its files
could shadow our imports, and `-P` would show in `sys.flags`, which children inherit. Until the path is as it
should be, only modules are imported that Python has loaded anyway: the others here could shadow them.
"""

import os
import sys

PLAIN = frozenset(sys.modules)
"""Names of the modules that Python has loaded before Rearview."""

if not sys.flags.safe_path:
    del sys.path[0]
while (number := os.open(os.devnull, os.O_RDWR)) < 3:
    pass  # a closed standard stream: no file of Rearview may take its number
os.close(number)

from rearview.runtime.run_program import main  # noqa: E402 - only now is the path as it should be

if __name__ == "__main__":
    main(PLAIN)
