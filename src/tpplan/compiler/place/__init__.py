"""The search for the cheapest layouts and reshards that keep every body free of communication."""
