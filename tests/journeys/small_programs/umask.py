import os

print(oct(os.umask(0o077)))
for i in range(2):
    open(f"{i}.txt", "w").close()
    print(oct(os.stat(f"{i}.txt").st_mode))
