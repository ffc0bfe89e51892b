"""A run directory checked and proved: every byte against its hash, its steps made again."""
