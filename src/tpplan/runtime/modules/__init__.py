"""The classes that stock modules are swapped for, and how their forwards run."""
