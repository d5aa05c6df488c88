"""(Program, Model, params, batch) -> Result: a walk down the list of ops, which defines the meaning of a program."""
