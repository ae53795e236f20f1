values = 3
for i in range(2):
    print(valeus)
