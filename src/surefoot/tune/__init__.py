"""Finding settings: variants of a run trained side by side, compared, and searched for."""
