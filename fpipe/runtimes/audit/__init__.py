"""audit: run a part of a step again by its definition, and compare."""
