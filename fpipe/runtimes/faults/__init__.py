"""(an error, an absence or Ctrl-C on one rank) -> one clear error on every rank."""
