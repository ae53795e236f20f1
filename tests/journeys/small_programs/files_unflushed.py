kept = open("kept.txt", "w")
for i in range(3):
    kept.write(f"{i}\n")
