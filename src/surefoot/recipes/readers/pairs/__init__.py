"""Translation data sets: pairs of sentences in two languages."""
