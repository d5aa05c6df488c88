"""(a call of a stage, a random key) -> output and loss, whether the call was pure, and what it depended on."""
