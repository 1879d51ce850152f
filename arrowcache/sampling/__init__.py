"""Sampling: user code draws samples, on any executor, one segment a task."""
