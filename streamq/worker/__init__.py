"""A pool: a parent, and processes that run handlers under leases."""
