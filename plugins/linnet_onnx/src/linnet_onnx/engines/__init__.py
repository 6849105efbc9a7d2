"""Scripts that run an engine on an export; they import nothing of Linnet."""
