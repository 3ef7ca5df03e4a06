"""What a process tells those who look after it: metrics, health, logs, systemd."""
