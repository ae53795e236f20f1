"""`python -m rearview` is the command `rearview`."""

from rearview.cli.main import main

if __name__ == "__main__":
    main()
