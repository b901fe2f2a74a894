"""transformers: its folders, its configs, and the stock models that these name."""
