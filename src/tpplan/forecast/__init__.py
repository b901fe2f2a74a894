"""What a program will cost, before a GPU is rented; which degrees to take; what the next best plan takes."""
