"""Data by step: which samples a step sees (plan), how they get there (feed), and the data sets."""
