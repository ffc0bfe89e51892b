"""Run directories as pages: one self-contained file of HTML, and pictures of the main curves."""
