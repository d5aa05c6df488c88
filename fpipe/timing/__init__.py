"""(Program, Costs) -> Timeline, Bounds: what a program costs in time and memory."""
