import sys

for i in range(3):
    sys.stdout.buffer.write(bytes(range(250, 256)))
    sys.stdout.write("text\r")
    sys.stdout.flush()
sys.stdout.buffer.write(b"\n\x00end")
