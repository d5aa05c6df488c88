"""(stage, signature) -> linearized stage: forward and backward as straight lists of torch ops, compiled to Python."""
