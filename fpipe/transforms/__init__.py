"""Program -> Program: each file one rewrite, its picture before and after in the docstring."""
