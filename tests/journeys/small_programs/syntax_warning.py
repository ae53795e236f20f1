for i in range(3):
    if i is 1:
        print("one")
assert (i, "always")
x = "\d"
print(x)
