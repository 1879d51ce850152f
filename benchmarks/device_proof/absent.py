"""Absent packages: what stands in for cloudpickle, which a machine with a GPU may lack.

arrowcache imports it. Functions then go to other processes by name alone; worker processes cannot start.
"""

from __future__ import annotations

import pickle
import sys
import types

try:
    import cloudpickle  # noqa: F401  # it is asked for
except ImportError:
    lacks_cloudpickle = True
else:
    lacks_cloudpickle = False


def stand_in() -> None:
    """Have `import cloudpickle` find a module that pickles as Python does, where there is none."""
    if lacks_cloudpickle:
        module = types.ModuleType("cloudpickle")
        module.__dict__.update(
            Pickler=pickle.Pickler,
            dumps=pickle.dumps,
            loads=pickle.loads,
            register_pickle_by_value=lambda _: None,
        )
        sys.modules["cloudpickle"] = module
