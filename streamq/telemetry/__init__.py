"""Tells operators how a process is: metrics, health, logs, messages to systemd."""
