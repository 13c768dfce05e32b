"""Looking at runs, from what is in their directories: summaries, curves, a page, a server of pages, plots."""
