# shell: $RUN stdin_closed.py <&-; echo code $?
import sys

print(sys.stdin)
for i in range(3):
    print(i)
input()
