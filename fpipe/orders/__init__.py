"""A placed program as numbers: play an order of it, climb to a better one, stretch it to more microbatches."""
