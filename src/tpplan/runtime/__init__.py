"""The sharded model at work: modules, parameters and collectives."""
