import os

first = os.open(__file__, os.O_RDONLY)
for i in range(3):
    second = os.open(__file__, os.O_RDONLY)
    print(second == first + 1 + i)
