"""`python -m server` is the command `fovea`."""

import sys

from server.cli import main

if __name__ == "__main__":
    sys.exit(main())
