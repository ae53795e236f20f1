# run: argv.py a "b c" --help -m x -- "" é
import sys

print(sys.argv, sys.orig_argv[1:], len(sys.argv))
for i, word in enumerate(sys.argv):
    print(i, repr(word))
