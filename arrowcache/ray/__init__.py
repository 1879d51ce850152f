"""Ray: samplers all over a cluster, a cache on every training node. Importing this package imports ray.

    nodes.py     NodeCaches, and what runs on nodes: draw one segment anywhere, publish it where training is
    pool.py      SamplerPool: samplers at work until `stop()`; numbers and runs their tasks

A record batch is sent once, as the segment's file, through Ray's object store.
"""

try:
    from arrowcache.ray.nodes import NodeCaches
    from arrowcache.ray.pool import SamplerPool
except ModuleNotFoundError as error:
    raise ImportError(
        f"arrowcache.ray needs {error.name}, which is not installed: pip install 'arrowcache[ray]'"
    ) from error

__all__ = ["NodeCaches", "SamplerPool"]
