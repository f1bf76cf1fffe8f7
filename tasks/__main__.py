"""`python -m tasks COMMAND ...`: the same command line as `./xsa`, also under torchrun."""

import sys

from tasks.runner.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
