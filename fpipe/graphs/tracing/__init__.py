"""(stage, abstract values) -> joint graph of forward and backward."""
