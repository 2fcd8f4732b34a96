"""The contestants, each a script that its own environment runs as `python -m peers.<name>`; none needs descant."""
