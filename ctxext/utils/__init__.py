"""What every room checks and reads by: values, JSON files, processes, servers."""
