"""(Gradients or parameters from elsewhere, Model, batch) -> Report, or the mistake that explains them by its name."""
