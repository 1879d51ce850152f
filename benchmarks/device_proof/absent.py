"""Absent packages: what stands in for cloudpickle, which a machine with a GPU may lack.

arrowcache imports it. Worker processes have this process' `sys.path`, and so the same.
"""

from __future__ import annotations

import sys
from pathlib import Path


def stand_in() -> None:
    """Have `import cloudpickle` find a module that pickles as Python does, where there is none."""
    try:
        import cloudpickle  # noqa: F401  # it is asked for
    except ImportError:
        sys.path.insert(0, str(Path(__file__).with_name("stand_ins")))
