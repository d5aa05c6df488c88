"""Call one stage: its keyword arguments, its random numbers, its checked outputs, and its autograd graph."""
