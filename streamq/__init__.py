"""streamq: put a huge input through your function, on a shared fleet, and lose nothing."""
