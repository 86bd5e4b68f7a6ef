"""Pictures of the results, which `tables.py` draws."""
