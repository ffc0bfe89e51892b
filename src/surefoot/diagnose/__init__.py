"""Problems of a run, from its records alone: findings with evidence, causes and remedies. Torch-free."""
