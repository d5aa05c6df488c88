"""joint graph -> F, I, W and U -> Python functions."""
