"""The mistakes on the documentation's pages about plugins: a module for each page, and a function for each mistake."""
