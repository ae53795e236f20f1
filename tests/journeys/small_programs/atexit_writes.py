import atexit

lines = []


@atexit.register
def save():
    with open("log.txt", "w") as file:
        for line in lines:
            file.write(line)


for i in range(5):
    lines.append(f"{i}\n")
