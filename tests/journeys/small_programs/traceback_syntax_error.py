print("never")
for i in range(3):
    print("é", i
x = 1
