import pickle


class Point:
    def __init__(self, x):
        self.x = x

    def __eq__(self, other):
        return self.x == other.x


def f(x):
    return x


points = [Point(i) for i in range(3)]
for protocol in range(6):
    data = pickle.dumps(points, protocol)
    print(protocol, data, pickle.loads(data) == points)
print(pickle.dumps(f), pickle.loads(pickle.dumps(f)) is f, Point.__module__, f.__module__)
