"""(Program, Model, batch) -> Costs, Sizes: one run or one trace, read as seconds and bytes."""
