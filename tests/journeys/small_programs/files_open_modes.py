import os

with open("data.bin", "wb") as file:
    for i in range(10):
        file.write(bytes([i]))
with open("data.bin", "r+b") as file:
    for i in (2, 5):
        file.seek(i)
        file.write(b"x")
fd = os.open("low.txt", os.O_CREAT | os.O_WRONLY, 0o600)
for i in range(3):
    os.write(fd, b"%d" % i)
os.close(fd)
print(oct(os.stat("low.txt").st_mode), open("data.bin", "rb").read())
try:
    open("data.bin", "x")
except FileExistsError as exc:
    print(exc)
