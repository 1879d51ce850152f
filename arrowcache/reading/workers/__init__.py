"""Worker processes: make batches beside each other, into memory that they share with the loader."""
