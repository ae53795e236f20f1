def f(data):
    for key in data:
        value = data[key]["a"]["b"] + data[key]["c"]["d"]
    return value


f({"x": {"a": {"b": 1}, "c": {}}})
