"""The demo: a small trained model, sharded over processes of this machine, against itself in one piece."""
