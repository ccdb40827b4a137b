"""How the bytes of one edge get from a publisher process into a slot of a subscriber process."""
