"""Plain data that the passes hand on: traces, regions, layouts, programs."""
