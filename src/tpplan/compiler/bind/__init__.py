"""What a plan says of modules and parameters: styles, products, packs, and the regions that are solved."""
