"""(Program, Model, one signature) -> a flat list of instructions."""
