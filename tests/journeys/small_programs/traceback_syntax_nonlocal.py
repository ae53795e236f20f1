def f():
    for i in range(3):
        nonlocal i
