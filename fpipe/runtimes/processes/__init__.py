"""(Program, Model, process group) -> step of one rank: messages, exchanges, replicas."""
