"""JAX: the same loader, yielding JAX arrays. Importing this package imports jax."""

try:
    from arrowcache.jax.loader import Loader
except ModuleNotFoundError as error:
    raise ImportError(
        f"arrowcache.jax needs {error.name}, which is not installed: pip install 'arrowcache[jax]'"
    ) from error

__all__ = ["Loader"]
