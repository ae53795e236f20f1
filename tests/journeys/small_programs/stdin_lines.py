# stdin: one\ntwo\nthree\n
import sys

print(input("name? "))
for line in sys.stdin:
    print(repr(line))
try:
    input()
except EOFError as exc:
    print(exc)
