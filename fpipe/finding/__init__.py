"""(Program, costs, memory) -> SearchResult: the best schedule that a search finds, and how good any can be."""
