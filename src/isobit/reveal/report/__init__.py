"""A revealed order as a picture and a page; without torch."""
