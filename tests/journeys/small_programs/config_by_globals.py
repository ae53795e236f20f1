# run: config_by_globals.py --batch=8
import sys

batch = 4
rate = 0.1
for word in sys.argv[1:]:
    name, _, value = word.removeprefix("--").partition("=")
    assert name in globals()
    globals()[name] = int(value)
config = {k: v for k, v in globals().items() if isinstance(v, (int, float, str, list, range, tuple)) and k != "__file__"}
print(config)
for step in range(3):
    pass
print({k: v for k, v in globals().items() if isinstance(v, (int, float, str, list, range, tuple)) and k != "__file__"})
