"""Functions over classes that are split over the ranks."""
