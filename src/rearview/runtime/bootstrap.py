"""The file that Python executes first in a process that runs the user's program.

The command is `python …/bootstrap.py`: `-m` would put the user's folder first on `sys.path`, so that the user's
files could shadow Rearview's imports, and `-P` would show in `sys.flags`, which child processes inherit. Until
`sys.path` is corrected, this file imports only modules that Python has loaded anyway: a file in this folder could
shadow any other module.
"""

import os
import sys

PLAIN = frozenset(sys.modules)
"""Names of the modules that Python has loaded before any module of Rearview."""

if not sys.flags.safe_path:
    del sys.path[0]
while (number := os.open(os.devnull, os.O_RDWR)) < 3:
    pass  # `number` belongs to a closed standard stream: keep it open, so that no file of Rearview gets it
os.close(number)

from rearview.runtime.run_program import main  # noqa: E402 - only now is `sys.path` correct

if __name__ == "__main__":
    main(PLAIN)
