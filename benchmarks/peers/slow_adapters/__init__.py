"""One module a peer that keeps a slow Dataset's items: `epochs`, as `slow_items.Epochs` says."""
