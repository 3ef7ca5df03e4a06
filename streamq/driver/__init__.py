"""The way to a server: URLs, connections, errors. No other folder imports redis-py."""
