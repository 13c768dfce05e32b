"""Views of runs, created from the files in their directories: summaries, curves, plots, HTML pages and a server."""
