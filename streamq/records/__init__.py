"""From bytes to records to values, and back. Knows no server."""
