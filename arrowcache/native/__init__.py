"""Native: the engine and orders, one library in C, how it is compiled, and its faces."""
