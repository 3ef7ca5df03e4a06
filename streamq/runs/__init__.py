"""Files in, results out: load, collect, and both at once with a pool."""
