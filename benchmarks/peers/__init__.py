"""Side by side with what people use today: `make peers`.

Each peer has an adapter in `adapters/` and an environment of its own (`registry.py`); `workload.py` is what
all of them store and deliver, `case.py` measures one of them in a fresh process, `__main__.py` runs all
cases, `report.py` writes the tables and plots.
"""
