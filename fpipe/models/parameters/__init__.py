"""whole pytrees, or a net's named tensors <-> one pytree per stage."""
