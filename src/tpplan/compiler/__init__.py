"""The passes from a plan and a model to a program."""
