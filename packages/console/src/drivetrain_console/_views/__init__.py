"""Views of runs, created from the files in the run directories: summaries, curves, plots, HTML pages and a server."""
