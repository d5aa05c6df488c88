"""graph: a straight list of torch ops with named values, as text and with symbolic sizes."""
