"""(function, signature) -> graphs: what a stage computes, as straight lists of torch ops, and Python made of them."""
