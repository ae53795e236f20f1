import traceback

SOURCE = """
for i in range(3):
    if i == 2:
        raise ValueError(i)
"""
for name in ("<string>", "made.py"):
    try:
        exec(compile(SOURCE, name, "exec"), {})
    except ValueError:
        traceback.print_exc()
exec(SOURCE)
