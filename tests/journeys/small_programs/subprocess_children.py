import subprocess
import sys

for i in range(2):
    done = subprocess.run([sys.executable, "-c", f"import sys; print(sys.argv, {i}); sys.exit({i})"], capture_output=True, text=True)
    print(done.stdout, done.stderr, done.returncode)
print(subprocess.run([sys.executable, "-c", "import os; print(sorted(k for k in os.environ if 'GLIBC' in k))"], capture_output=True, text=True).stdout)
print(subprocess._args_from_interpreter_flags())
