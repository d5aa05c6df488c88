"""(Program, Model) -> step: each file one way to run a program."""
