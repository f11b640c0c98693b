"""What all rooms share: progress, devices, threads, messages, files on disk, locks, event logs."""
