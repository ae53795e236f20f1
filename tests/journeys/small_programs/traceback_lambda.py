functions = []
for i in range(3):
    functions.append(lambda x, i=i: x / i)
print([f(1) for f in functions[1:]])
print(sorted([3, 1], key=functions[0]))
