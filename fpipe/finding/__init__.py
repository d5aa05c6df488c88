"""(Program, costs, memory) -> Found: the best schedule that a search finds, and how good any can be."""
