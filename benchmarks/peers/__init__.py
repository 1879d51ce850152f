"""Side by side with what people use today: `make peers`.

Each peer has an adapter in `adapters/` and an environment of its own (`registry.py`); `workload.py` is what
all of them store and deliver, `case.py` measures one of them in a fresh process, `__main__.py` runs all
cases, `report.py` writes the tables and plots. `slow.py` measures something else, and writes nothing: a slow
Dataset beside what keeps its items, with adapters in `slow_adapters/`.
"""
