"""Which transitions come next: one way of drawing a file."""
