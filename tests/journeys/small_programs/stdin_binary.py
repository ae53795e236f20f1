# stdin: \x00\xff\xfe\n\r\n
import sys

data = sys.stdin.buffer.read()
for byte in data:
    print(byte)
