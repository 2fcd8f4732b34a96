"""Entry point of `python -m descant`."""

from .cli import main

main()
