import os
import sys

print(sys.path[0] == os.getcwd(), [p for p in sys.path if "rearview" in p.lower() and "site-packages" not in p and not p.startswith(os.getcwd())])
print(len(sys.path), sys.path[1:])
print(sys.flags, sys.flags.safe_path)
print(sys.executable, sys.prefix, sys.base_prefix)
