"""One module a peer of the rolling case: `running` and `reader`, as `peers.stream.Rolling` says."""
