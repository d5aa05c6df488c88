"""Functions or a net -> (Model, params, state): the front doors."""
