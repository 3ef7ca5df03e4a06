"""Requests and leases: submit, follow, steer, read and sweep; take, hold and renew."""
