"""Ray: samplers all over a cluster, a cache on every training node. Importing this package imports ray.

    caches.py    NodeCaches: the nodes with a cache, its path, and its settings
    pool.py      SamplerPool: samplers at work, from construction until `stop()`
    engine.py    numbers and runs tasks: draw anywhere, publish where training is
    draw.py   draw one segment, in a worker of any node
    ingest.py    publish it: the actor of a node

A record batch is sent once, as the segment's file, through Ray's object store.
"""

try:
    from arrowcache.ray.caches import NodeCaches
    from arrowcache.ray.pool import SamplerPool
except ModuleNotFoundError as error:
    raise ImportError(
        f"arrowcache.ray needs {error.name}, which is not installed: pip install 'arrowcache[ray]'"
    ) from error

__all__ = ["NodeCaches", "SamplerPool"]
