"""What a process tells its operators: metrics, health, logs, messages to systemd."""
