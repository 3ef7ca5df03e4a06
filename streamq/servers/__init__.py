"""Servers that are started here: embedded ones, local clusters."""
