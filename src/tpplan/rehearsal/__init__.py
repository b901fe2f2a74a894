"""Rehearsal: a program runs on shapes, as it will run, before it leaves the compiler's hands."""
