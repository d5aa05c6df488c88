"""(Program, Model) -> step on one process: straight down the list, or a thread a rank."""
