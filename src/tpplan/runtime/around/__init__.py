"""What others do around and outside of a model's calls."""
