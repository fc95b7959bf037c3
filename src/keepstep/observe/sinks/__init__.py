"""Where a run sends its metrics: its own files, TensorBoard, Prometheus, Weights & Biases, MLflow."""
