# run: argparse_error.py --nope
import argparse

parser = argparse.ArgumentParser(description="trains")
parser.add_argument("--epochs", type=int, default=3)
parser.parse_args()
