"""The ``streamq`` command."""
