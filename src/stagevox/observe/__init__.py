"""What operators see: metrics, timelines, logs. Knows no tensors and no engine."""
