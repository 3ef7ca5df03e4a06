"""Flows: their stages, how users write them down, and what their handlers return."""
