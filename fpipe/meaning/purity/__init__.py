"""(a call of a stage, a random key) -> output, loss and purity, with the settings and modules that it depended on."""
