"""What an operation makes of its operands' layouts."""
