"""(Program, Model) -> step: by name, one way to run a program."""
