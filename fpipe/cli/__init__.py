"""The command line, command by command; `fpipe.__main__` starts it."""
