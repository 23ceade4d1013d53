"""Pictures and pages for people, from what the layers below found. Never torch."""
