"""What the workers run. The only place that may import torch."""
