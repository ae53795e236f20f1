for i in "abc":
    globals()[f"made_{i}"] = i
    exec(f"other_{i} = {i!r}")
    if i == "b":
        del made_a
print([name for name in globals() if name.startswith(("made", "other"))])
for name in list(globals()):
    if not name.startswith("__"):
        print(name)
for name, value in globals().copy().items():
    pass
