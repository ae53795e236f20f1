import os

print(os.getcwd().endswith("work"))
os.mkdir("inner")
os.chdir("inner")
for i in range(2):
    with open(f"{i}.txt", "w") as file:
        file.write(os.path.relpath(os.getcwd(), ".."))
print(__file__, os.path.exists(os.path.basename(__file__)))
