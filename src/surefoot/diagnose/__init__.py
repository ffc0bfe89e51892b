"""What is wrong with a run, from its records alone: findings with evidence, causes and what to try. Torch-free."""
