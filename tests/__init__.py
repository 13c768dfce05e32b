"""A package, so that another distribution's top-level ``tests`` package cannot take its place."""
