"""What runs where: render text first, then submit it."""
