"""What travels on an edge besides full copies: frames of changes, made once and applied to a shadow slot."""
