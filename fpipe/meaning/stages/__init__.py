"""Call one stage: what it asks for, its random numbers, what it returns, and the way back through autograd."""
