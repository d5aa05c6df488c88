"""(a call of a stage) -> whether the call was pure, and the settings and modules that it depended on."""
