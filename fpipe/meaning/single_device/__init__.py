"""(Model, params, batch) -> Result, by plain autograd; and batches, cut and joined, for it and for the runtimes."""
