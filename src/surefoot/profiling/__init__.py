"""Where the time, the memory and the arithmetic of a step go, and what would make it quicker: measured on a run that does not notice."""
