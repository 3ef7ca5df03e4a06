"""What anybody may do with requests: submit, hold, steer, read, sweep."""
