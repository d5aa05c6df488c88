"""(a call of a stage) -> whether it only did what a pure function may, and all it depended on besides its arguments."""
