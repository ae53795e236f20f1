class Source:
    def __iter__(self):
        return self

    def __next__(self):
        return self.read()

    def read(self):
        raise OSError("cannot read")


def train():
    for x in Source():
        print(x)


train()
