"""Model -> Model: forward derivatives, gradients per example, frozen leaves, rules of your own."""
