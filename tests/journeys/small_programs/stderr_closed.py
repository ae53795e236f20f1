# shell: $RUN stderr_closed.py 2>&-; echo code $?
import sys

print(sys.stderr)
for i in range(3):
    print(i)
    print("lost", file=sys.stderr)
raise ValueError("nobody hears")
