for i in range(2):
    answer = input(f"{i}? ")
