"""Examining servers and queues, and mending them."""
