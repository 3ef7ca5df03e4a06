"""The protocol: one Lua script per transition. Read as text by ``streamq.protocol.lua``."""
