"""Adapters to libraries that train models: `fpipe.integrations.transformers`."""
