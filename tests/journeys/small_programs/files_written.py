import csv
import json
import os

with open("log.csv", "w", newline="") as file:
    writer = csv.writer(file)
    for i in range(5):
        writer.writerow([i, i * i])
for i in range(3):
    with open("append.txt", "a") as file:
        file.write(f"{i}\n")
    json.dump({"i": i}, open(f"{i}.json", "w"))
os.rename("0.json", "moved.json")
os.remove("1.json")
os.makedirs("a/b", exist_ok=True)
os.symlink("../log.csv", "a/link")
print(sorted(os.listdir(".")), os.stat("log.csv").st_size)
