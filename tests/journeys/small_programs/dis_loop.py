import dis
import io


def f(n):
    return n + 1


out = io.StringIO()
dis.dis(f, file=out)
print(out.getvalue())
