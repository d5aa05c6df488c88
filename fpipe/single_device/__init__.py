"""(Model, params, batch) -> Result, by plain autograd: no program, and nothing of a runtime."""
