"""Looking at servers and queues, and mending them."""
