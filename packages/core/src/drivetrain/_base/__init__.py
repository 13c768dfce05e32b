"""Small tools that everything else may use: the console, pickling, captured failures, interrupts."""
