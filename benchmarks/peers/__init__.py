"""Side by side with what people use today: `make peers`.

Each peer has an adapter (`adapters.py`) and an environment of its own (`registry.py`); all store and deliver
the data set of `workload.py`; `case.py` measures one of them in a fresh process, `__main__.py` runs all
cases, `report.py` writes the tables and plots. `rolling.py` is the case of a cache that drops
its oldest rows, `faults.py` does harm. `slow.py` measures something else, and writes nothing: a slow Dataset
beside ways to keep its items.
"""
