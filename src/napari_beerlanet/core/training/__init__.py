"""Fine-tuning: settings, run folders, monitoring, multi-GPU, comparison before and after."""
