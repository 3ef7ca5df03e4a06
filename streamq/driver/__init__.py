"""The way to a server: URLs, connections, errors. Nothing else imports the driver."""
