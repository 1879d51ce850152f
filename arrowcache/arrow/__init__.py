"""Arrow: logical types to columns and back, one segment to one file and back. No I/O."""
