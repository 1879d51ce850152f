"""`python -m arrowcache.cli`: the `arrowcache` command where no script is installed."""

import sys

from arrowcache.cli import main

sys.exit(main())
