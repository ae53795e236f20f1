import contextlib
import io
import sys

held = io.StringIO()
with contextlib.redirect_stdout(held):
    for i in range(3):
        print("held", i)
print(held.getvalue())
real = sys.stdout


class Tee:
    def write(self, text):
        real.write(text.upper())

    def flush(self):
        real.flush()


sys.stdout = Tee()
for i in range(2):
    print("shouted")
