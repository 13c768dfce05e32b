"""The code that runs in the driver: from the trainer to the result."""
