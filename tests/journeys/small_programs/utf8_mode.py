# env: PYTHONUTF8=1 LC_ALL=C
import locale
import sys

print(sys.flags.utf8_mode, sys.stdout.encoding, locale.getpreferredencoding(), locale.getlocale())
for text in "é€":
    print(text)
