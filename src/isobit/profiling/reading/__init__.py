"""Read traces of torch.profiler: files and archives, JSON as a stream, events with their calls."""
