def f():
    for i in range(3):
        if i == 1:
            raise KeyboardInterrupt


f()
