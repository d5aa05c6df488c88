"""(Model or costs, ranks, memory) -> Plan, RunPlan: which schedule, how many microbatches, what to recompute."""
