"""Changes of the settings of a run that goes on."""
