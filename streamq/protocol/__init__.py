"""The scripts of ``lua/`` in Python: keys, arguments, typed replies. The rules are in the Lua."""
