"""What a Job does on the host before and after its container."""
