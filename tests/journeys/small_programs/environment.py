# env: MINE=1 EMPTY= SPACES="a b"
import os
import subprocess

print(sorted(k for k in os.environ if k.startswith(("MINE", "EMPTY", "SPACES", "PYTHON", "GLIBC"))))
print(os.environ["MINE"], repr(os.environ["EMPTY"]), os.environ["SPACES"], os.getenv("NONE"))
os.environ["ADDED"] = "2"
del os.environ["MINE"]
os.putenv("LOW", "3")
for name in ("ADDED", "MINE", "LOW"):
    print(subprocess.run(f"echo ${name}", shell=True, capture_output=True, text=True).stdout)
