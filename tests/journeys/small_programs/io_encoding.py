# env: PYTHONIOENCODING=latin-1:replace
import sys

print(sys.stdout.encoding, sys.stdout.errors)
for text in ("é", "€"):
    print(text)
