"""A run that is there, checked and proved: every byte against its hash, its records against each other, its steps made again."""
