"""Entry of `python -m train`."""

import sys

from train.program import main

if __name__ == "__main__":
    sys.exit(main())
