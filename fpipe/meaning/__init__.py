"""(Program, Model, params, batch) -> Result: a walk down the list of ops, which defines what a program computes."""
