"""The dashboard: what is shown of queues and requests in a browser, and how it is kept live."""
