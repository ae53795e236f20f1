# run: argv_options.py --every --quiet --epsilon 3 -q --version
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--every", action="store_true")
parser.add_argument("--quiet", action="store_true")
parser.add_argument("--epsilon", type=int)
parser.add_argument("-q", action="store_true")
parser.add_argument("--version", action="version", version="%(prog)s 1")
print(parser.parse_args())
