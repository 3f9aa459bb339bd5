"""What happens once before the first step."""
