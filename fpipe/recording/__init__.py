"""(a net, its optimizer, a training loop) -> a folder with the tensors of each step."""
