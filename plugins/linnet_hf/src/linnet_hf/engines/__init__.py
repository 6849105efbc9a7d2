"""Scripts that run an engine in an environment of its own; none of them imports Linnet."""
