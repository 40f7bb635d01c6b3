"""Resources of a process on its machine, and the backends of host and GPU memory."""
