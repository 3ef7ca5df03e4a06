"""The commands: one module each, imported when that command is typed."""
