"""`python -m arrowcache.cli`: as `python -m arrowcache`."""

import sys

from arrowcache.cli import main

if __name__ == "__main__":
    sys.exit(main())
