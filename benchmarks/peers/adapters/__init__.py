"""One module a peer: `write` and `loader`, as `benchmarks.peers.workload.Adapter` says."""
