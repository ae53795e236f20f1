# env: PYTHONWARNINGS=always::ResourceWarning
def read():
    for i in range(2):
        open(__file__).read(1)


read()
