"""(Program, Costs) -> Timeline, Bounds: the time and memory that a program takes."""
