"""Compare gradients with plain autograd: those of a program, and those from elsewhere."""
