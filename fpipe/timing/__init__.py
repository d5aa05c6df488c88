"""(Program, Costs) -> Timeline, Bounds, Plan: what a program costs in time and memory."""
