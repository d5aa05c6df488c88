"""(net or loss, example) -> one flat graph of it, with the lines and modules it came from."""
