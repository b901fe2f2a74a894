"""What tpplan shows: diagnostics, the catalogue of codes and programs, as text, JSON and HTML."""
