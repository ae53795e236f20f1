class Config:
    values = {}
    for name in ("a", "b", "c"):
        values[name] = len(name)
        if name == "c":
            raise AttributeError(name)
