"""`python -m aotc`: the command line."""

from aotc.cli import main

if __name__ == "__main__":
    main(prog_name="aotc")
