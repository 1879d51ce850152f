"""Native: the engine, one library in C, how it is compiled, and its face."""
