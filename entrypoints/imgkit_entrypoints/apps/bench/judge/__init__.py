"""What the measured figures mean."""
