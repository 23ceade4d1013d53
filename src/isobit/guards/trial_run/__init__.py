"""Run the first steps of a training program under checks, before it costs GPU time."""
