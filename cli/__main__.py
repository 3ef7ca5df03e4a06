"""``python -m streamq.cli``."""

from .app import main

main()
