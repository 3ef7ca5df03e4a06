"""The scripts of ``lua/`` in Python: keys, arguments, typed replies. Decides nothing."""
