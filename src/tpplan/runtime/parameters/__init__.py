"""Parameters and other tensors of which a rank holds parts."""
