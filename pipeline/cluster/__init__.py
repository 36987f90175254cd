"""The cluster file, the way in to a cluster, and what can be checked of one."""
