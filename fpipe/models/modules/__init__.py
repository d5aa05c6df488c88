"""nn.Module -> Stage: a module as a pure function of its parameters, buffers and inputs."""
