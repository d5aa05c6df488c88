"""(Program, Model, batch) -> Report: a step beside plain autograd, leaf by leaf."""
