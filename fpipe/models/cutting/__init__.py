"""(flat graph, places to cut) -> stages with their parameters, buffers and ties."""
