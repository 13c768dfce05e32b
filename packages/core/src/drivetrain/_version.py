# A constant, because reading it from the installed metadata costs a third of the time that `import drivetrain` takes.
__version__ = "0.1.0"
