"""Scripts of the contestants, run as `python -m peers.<name>` in their own environments without descant."""
