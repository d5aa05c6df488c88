"""() -> what torch does not promise: each file one part of torch, each function with the versions it was tried on."""
