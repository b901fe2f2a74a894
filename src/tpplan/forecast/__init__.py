"""What a program will cost in time and memory, before a GPU is rented; and which degrees to take."""
