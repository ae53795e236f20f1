import os

os.mkdir("gone")
os.chdir("gone")
os.rmdir("../gone")
for i in range(3):
    try:
        os.getcwd()
    except FileNotFoundError as exc:
        print(i, exc)
