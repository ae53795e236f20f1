# shell: $RUN stdout_closed.py >&-; echo code $?
import sys

print("x")
for i in range(3):
    print(i, file=sys.stderr)
print(sys.stdout, file=sys.stderr)
