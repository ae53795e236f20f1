def f():
    for i in range(3):
        def g():
            continue
