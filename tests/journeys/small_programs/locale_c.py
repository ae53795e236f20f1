# env: LC_ALL=POSIX PYTHONCOERCECLOCALE=0
import locale
import os
import sys

print(sys.stdout.encoding, sys.getfilesystemencoding(), locale.setlocale(locale.LC_CTYPE), os.environ.get("LC_CTYPE"))
