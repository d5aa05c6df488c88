"""Optimizers as functions: a rule by its name, (parameters, gradients, state, lr) -> (parameters, state)."""
