"""Read-through: the items of a finite dataset, each from the cache, or made, returned and published."""
