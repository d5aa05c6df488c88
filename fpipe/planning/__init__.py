"""(Model or costs, ranks, memory) -> RunPlan: which schedule, how many microbatches, what to recompute."""
