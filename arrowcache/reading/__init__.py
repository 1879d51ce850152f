"""Reading: one pass over what is there. Rows of published segments, never a decoded object."""
