for i in range(3):
    print("x" * 300_000)
print("no newline at the end", end="")
