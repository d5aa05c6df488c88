"""(a lowered step, a device) -> the whole step as one graph of the device, captured once and replayed."""
