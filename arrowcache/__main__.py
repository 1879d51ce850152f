"""`python -m arrowcache`: the `arrowcache` command, also where no script is on the path."""

import sys

from arrowcache.cli import main

if __name__ == "__main__":
    sys.exit(main())
